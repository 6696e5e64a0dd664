// An activation in the forms that products read, made once for all its readers.
#pragma once

#include "core/arena.h"
#include "fp8/fp8_matrix.h"

namespace rowshard {

/// x [T, K] as FP8: 1×128 groups, or MX 1×32 for MX weights.
struct QuantizedActivation {
  Grouping grouping = Grouping::k1x128;
  Tensor codes, scales;                        // rowwise [T, K]
  Tensor columnwise_codes, columnwise_scales;  // [K, T up to kRowStep]: zero rows were added

  /// Products that contract over tokens read whole steps of this many.
  static constexpr int64_t kRowStep = 16;

  Usage usage() const { return {static_cast<bool>(codes), static_cast<bool>(columnwise_codes)}; }
  Fp8View rowwise() const { return {codes, scales, grouping}; }
  Fp8View columnwise() const { return {columnwise_codes, columnwise_scales, grouping}; }
  void drop_rowwise() {
    codes.reset();
    scales.reset();
  }
};

/// Memory for a rowwise copy, for a kernel that quantises what it computes.
QuantizedActivation allocate_rowwise(Shape shape, Grouping grouping, Category category,
                                     const char* name, Context& ctx);
/// Adds the asked copies of x [T, K], those that are missing; both by one kernel where T allows.
void quantize_activation(QuantizedActivation& into, const ConstView& x, Usage copies,
                         Category category, const char* name, Context& ctx);

struct LinearInput {
  ConstView x;   // [T, K]; no data where nothing reads x as it is (shape and dtype are there)
  Tensor owned;  // x made again, when it is nobody else's
  QuantizedActivation x8;
};

}  // namespace rowshard
