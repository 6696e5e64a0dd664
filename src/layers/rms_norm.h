// RMSNorm over the last dimension, in Hugging Face's order of roundings:
//   rstd = 1 / sqrt(mean(x²) + eps),   y = T(x · rstd) · weight
// x is widened to f32 (f64 for f64), x · rstd is rounded to T, and only then multiplied by weight.
//
// x may be any tensor whose last dimension is H (T tokens, or T·heads rows of a per-head norm); all
// other dimensions are rows. T is f64 (host only), f32 or bf16. Queued on the stream, no allocation
// in the forward. ShapeError names the operands that do not fit.
#pragma once

#include "core/arena.h"

namespace rowshard {

/// y [rows, H] T, rstd [rows] f32 (f64 for f64), x [rows, H] T, weight [H] T. y may be x.
void rms_norm(const View& y, const View& rstd, const ConstView& x, const ConstView& weight,
              double eps, Stream& stream);

/// With g = dy · weight and n = x · rstd:  dx = rstd · (g − n · mean(g · n)), or dx += that when
/// `accumulate` (the residual path has already put its gradient there). dx may be dy when not
/// accumulating. The rounding of x · rstd counts as the identity.
/// dweight, when it has data, [H] f32 (f64 for f64): dweight += Σ_rows dy · n, summed in a fixed
/// order; it takes scratch from the arena.
void rms_norm_backward(const View& dx, const ConstView& dy, const ConstView& x,
                       const ConstView& weight, const ConstView& rstd, bool accumulate,
                       const View& dweight, Context& ctx);

}  // namespace rowshard
