// For the sources of this room only: from a run-time dtype to a C++ type, and the one form of the
// message when operands do not fit.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "core/arena.h"
#include "fp8/fp8_view.h"

namespace rowshard {

/// Loops shorter than this stay on one thread: starting threads costs more than they save.
inline constexpr int64_t kParallelElements = 32768;

/// f64 for f64, f32 for everything else: what an operation computes in and keeps statistics in.
inline DType accumulator_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

inline bool is_float_dtype(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16;
}

/// "rms_norm: y f32 [4, 8] on host, x …; <rule>" as a ShapeError unless ok.
inline void check_operands(bool ok, const char* operation, const char* rule,
                           std::initializer_list<std::pair<const char*, ConstView>> operands) {
  if (ok)
    return;
  std::string text = message(operation, ": ", rule, "; got");
  for (const auto& [name, view] : operands)
    text += message(" ", name, " ", describe(view), ",");
  text.pop_back();
  throw ShapeError(text);
}

/// Same dtype (one that is computed with), shape and device.
inline bool same_operands(const ConstView& first, std::initializer_list<ConstView> others) {
  bool same = is_float_dtype(first.dtype);
  for (const ConstView& other : others) {
    same = same && other.dtype == first.dtype && other.shape == first.shape &&
           other.device == first.device;
  }
  return same;
}

/// Codes that a kernel writes beside its result y: 1×128 e4m3 of y's shape. Null is fine.
inline void check_fused_codes(const char* operation, const Fp8View* y8, const ConstView& y) {
  if (!y8)
    return;
  check(ConstFp8View(*y8), operation);
  check_operands(y8->grouping == Grouping::k1x128 && y8->codes.dtype == DType::kE4M3 &&
                     y8->outer() == y.rows() && y8->inner() == y.cols() &&
                     y8->codes.device == y.device && y.dtype != DType::kF64,
                 operation, "codes 1x128 e4m3 of an f32 or bf16 result, of its shape",
                 {{"y", y}, {"codes", y8->codes}});
}

/// f(T{}) with T the element type of a host operation.
template <typename F>
void for_host_type(DType dtype, const char* operation, F&& f) {
  switch (dtype) {
    case DType::kF64:
      return f(double{});
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(bf16{});
    default:
      throw ShapeError(message(operation, " takes f64, f32 or bf16, not ", to_string(dtype)));
  }
}

/// f(T{}) with T the element type of a kernel.
template <typename F>
void for_cuda_type(DType dtype, const char* operation, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(bf16{});
    default:
      throw ShapeError(message(operation, " on cuda takes f32 or bf16, not ", to_string(dtype)));
  }
}

}  // namespace rowshard
