// Quantise to FP8 and back.
//
// Per block (1×128, 128×128): a = max |x| without NaN elements, multiplier = fp8_max / a, by
// default cut to a power of two so that scaling is exact; the stored scale is 1 / multiplier. MX
// (1×32, 32×32): the e8m0 scale is the smallest power of two that is not below a / fp8_max. Codes
// are x · multiplier rounded to nearest even and saturated. Edge cases: fp8/formats.h. Both devices
// give the same bytes, zero tolerance.
//
// The rowwise copy groups along K. The columnwise copy is of xᵀ, grouped along M. For 128×128 and
// 32×32 both hold the same codes. Asked for both, one kernel reads x once.
//
// Work is queued on `stream`, without allocation or host synchronisation, and may be captured.
// Throws ShapeError when shapes, dtypes, groupings or devices do not fit.
#pragma once

#include "fp8/fp8_view.h"

namespace rowshard {

struct QuantizeOptions {
  Fp8Format format = Fp8Format::kE4M3;
  bool power_of_two = true;  // 128 groupings only; MX scales always are
  float amax_epsilon = 0;    // 128 groupings only: a lower bound on a
  /// One f32 on the stream's device. 1 means: change nothing. A graph that is replayed with weights
  /// that did not change skips their quantisation by it.
  const float* skip = nullptr;
};

///   rowwise     [M, K] or null      columnwise  [K, M] or null
///   x           [M, K] f32, bf16 or f16 (more dimensions: M is the product of all but the last)
void quantize(const Fp8View* rowwise, const Fp8View* columnwise, const ConstView& x,
              const QuantizeOptions& options, Stream& stream);

/// y = code × scale in f32, rounded to y's dtype (f32, bf16, f16).
///   y  [outer, inner]
void dequantize(const View& y, const ConstFp8View& x, Stream& stream);

}  // namespace rowshard
