// Sums over rows, in a fixed order: the gradient of a bias.
#pragma once

#include "core/arena.h"

namespace rowshard {

/// result [N] += Σ_t x[t, :].  x [T, N] f64 (host only), f32 or bf16; result f32 (f64 for f64). The
/// host adds row by row; cuda adds rows p, p + 64, … for each of 64 parts, and the parts in order.
/// Scratch is workspace. ShapeError when they do not fit.
void add_column_sums(const View& result, const ConstView& x, Context& ctx);

inline constexpr int kColumnParts = 64;
/// [kColumnParts, N]: scratch of a sum over rows. The host does not read it, and takes it all the
/// same so that a plan counts what either device does.
Tensor column_parts(int64_t columns, DType dtype, Context& ctx);

}  // namespace rowshard
