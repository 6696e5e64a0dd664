// Cross entropy of logits [n, V] against labels [n] i32, all valid (rows without a label are left
// out by gather_rows before the head):  loss[i] = log Σ_v exp(z[i, v]) − z[i, label[i]].
// Computed in f32 (f64 for f64) with the row's maximum taken out.
#pragma once

#include "core/arena.h"

namespace rowshard {

/// loss_sum [1] f64: += Σ_i loss[i], in the fixed order of sum() in layers/elementwise.h (the
/// caller zeroes it once a step). logits [n, V] (f64 host only, f32, bf16) are replaced by their
/// gradient,
///   dlogits = (softmax(z) − onehot(label)) · scale,
/// where scale is 1 / (tokens with a label in the whole batch).
/// The host throws ShapeError on a label outside [0, V); on cuda its loss is NaN.
void cross_entropy(const View& loss_sum, const View& logits, const ConstView& labels, double scale,
                   Context& ctx);

/// losses [n] f32 (f64 for f64), nothing else; for validation and inference.
void token_losses(const View& losses, const ConstView& logits, const ConstView& labels,
                  Stream& stream);

}  // namespace rowshard
