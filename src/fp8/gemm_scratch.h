// Scratch of the FP8 products, for the sources of this room only: in one place, so that the plan
// device allocates what the device it stands for would.
#pragma once

#include "core/matmul.h"
#include "fp8/gemm.h"
#include "fp8/mx_scales.h"

namespace rowshard {

namespace host {

// OpenBLAS' kernels take rows by twelve and sum a remainder in another order. So a remainder is
// padded to twelve, and every row's result is that of any batch it comes in (with one thread).
inline constexpr int64_t kRowStep = 12;

struct GemmScratch {
  Tensor x, w;  // [M up to kRowStep, K], [N, K]: the operands in f32
  Tensor sums;  // [M, N]; no data for f32 results without bias, which are summed in place
  Tensor tail;  // [kRowStep, N], with or without a remainder: fewer rows never take more bytes

  GemmScratch(const View& y, const ConstFp8View& x8, const ConstFp8View& w8,
              const GemmOptions& options, Context& ctx) {
    const int64_t m = x8.outer(), n = w8.outer(), k = x8.inner();
    const auto make = [&](const char* name, int64_t rows, int64_t cols) {
      return ctx.arena.tensor(Category::kWorkspace, name, DType::kF32, {rows, cols});
    };
    x = make("fp8_gemm.x", round_up(m, kRowStep), k);
    w = make("fp8_gemm.w", n, k);
    if (y.dtype != DType::kF32 || options.bias)
      sums = make("fp8_gemm.sums", m, n);
    tail = make("fp8_gemm.tail", kRowStep, n);
  }
};

}  // namespace host

namespace cuda {

// cuBLAS' advice for block scaling on Hopper.
inline constexpr int64_t kGemmWorkspace = (int64_t{32} << 20) + 1024;

inline Buffer gemm_workspace(Context& ctx) {
  return ctx.arena.allocate(Category::kWorkspace, "gemm.workspace", kGemmWorkspace);
}

/// For an M that is no multiple of 8 under block scales: x and y with M rounded up.
struct PaddedGemmScratch {
  Tensor codes, result;
  Tensor scales;  // no data when those of x already fit

  PaddedGemmScratch(const View& y, const ConstFp8View& x, Context& ctx) {
    const int64_t padded = round_up(x.outer(), 8);
    const auto make = [&](const char* name, DType dtype, Shape shape) {
      return ctx.arena.tensor(Category::kWorkspace, name, dtype, shape);
    };
    codes = make("gemm.pad.x", x.codes.dtype, {padded, x.inner()});
    const Shape shape = gemm_scale_shape(x.grouping, padded, x.inner());
    if (x.grouping == Grouping::k1x128 && !(shape == x.scales.shape))
      scales = make("gemm.pad.s", DType::kF32, shape);
    result = make("gemm.pad.y", y.dtype, {padded, y.dim(1)});
  }
};

/// Scales of both operands as the tensor cores read them.
struct MxGemmScratch {
  Tensor x, w;

  MxGemmScratch(const ConstFp8View& x8, const ConstFp8View& w8, Context& ctx) {
    const auto make = [&](const char* name, const ConstFp8View& operand) {
      return ctx.arena.tensor(Category::kWorkspace, name, DType::kU8,
                              swizzled_scale_shape(operand.outer(), operand.inner()));
    };
    x = make("gemm.mx.x", x8);
    w = make("gemm.mx.w", w8);
  }
};

/// Where there is no FP8 product: both operands in bf16 and the sums in f32.
struct WidenedGemmScratch {
  Tensor x, w, sums;

  WidenedGemmScratch(const ConstFp8View& x8, const ConstFp8View& w8, Context& ctx) {
    const auto make = [&](const char* name, DType dtype, int64_t rows, int64_t cols) {
      return ctx.arena.tensor(Category::kWorkspace, name, dtype, {rows, cols});
    };
    x = make("gemm.wide.x", DType::kBF16, x8.outer(), x8.inner());
    w = make("gemm.wide.w", DType::kBF16, w8.outer(), w8.inner());
    sums = make("gemm.wide.y", DType::kF32, x8.outer(), w8.outer());
  }
};

}  // namespace cuda

}  // namespace rowshard
