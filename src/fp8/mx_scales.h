// MX scales as the tensor cores of compute capability 10 read them ("swizzled"): tiles of 128 rows
// by 4 groups of 32, 512 bytes each, in row-major order of tiles. Inside a tile the scale of row r
// and group g is byte r % 32 · 16 + r / 32 · 4 + g. What a tile holds beyond the matrix is 0.
// Layout: cuBLAS manual, "1D block scaling factors layout".
//
// 32×32 scales are repeated for each of their 32 rows on the way. Queued on `stream`, without
// allocation, may be captured. Throws ShapeError when shapes do not fit.
#pragma once

#include "fp8/fp8_view.h"

namespace rowshard {

/// [⌈outer/128⌉ · 128, ⌈⌈inner/32⌉/4⌉ · 4], as many bytes as it says; the order is the tiles'.
Shape swizzled_scale_shape(int64_t outer, int64_t inner);

///   y  u8, swizzled_scale_shape(x.outer(), x.inner()), every byte written
///   x  MX 1×32 or 32×32
void swizzle_mx_scales(const View& y, const ConstFp8View& x, Stream& stream);

}  // namespace rowshard
