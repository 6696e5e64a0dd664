// 128x128 quantisation by ranks that each hold a run of a matrix's elements, cut anywhere: also
// inside a block. Each takes the largest magnitudes of its own elements, the maximum over the ranks
// makes them those of the whole blocks, and each encodes its own elements. The result is what
// `quantize` makes of the whole matrix, bit for bit (fp8-block scale rule: fp8/formats.h).
//
// Elements are counted row by row; a run [first, first + count) is given by its values and `first`.
// Work is queued on `stream`; ShapeError when something does not fit.
#pragma once

#include "fp8/quantize.h"

namespace rowshard {

/// amax[b] = max(amax[b], |x|) for the elements of each block; NaN is left out.
///   amax    [ceil(rows/128), ceil(cols/128)] f32, not negative; the caller's zeros to begin with
///   values  [count] f32
void range_amax(const View& amax, const ConstView& values, int64_t first, int64_t cols,
                Stream& stream);

/// codes [count] e4m3, by the scales that `amax`, of whole blocks, gives.
void range_encode(const View& codes, const ConstView& values, int64_t first, int64_t cols,
                  const ConstView& amax, const QuantizeOptions& options, Stream& stream);

/// scales [gemm_scale_shape(128x128)] f32 from amax; padding is 1.
void block_scales(const View& scales, const ConstView& amax, const QuantizeOptions& options,
                  Stream& stream);

}  // namespace rowshard
