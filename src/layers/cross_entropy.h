// Cross entropy of logits [n, V] against labels [n] i32, all valid or kNoLoss (rows without a label
// are left out by gather_rows before the head):  loss[i] = log Σ_v exp(z[i, v]) − z[i, label[i]].
// Computed in f32 (f64 for f64) with the row's maximum taken out.
#pragma once

#include "core/arena.h"
#include "core/argument.h"

namespace rowshard {

/// A row with this label only makes up the number of rows: its loss and its gradient are 0.
inline constexpr int32_t kNoLoss = -1;

/// loss_sum [1] f64: += Σ_i loss[i], in the fixed order of sum() in layers/elementwise.h (the
/// caller zeroes it once a step). logits [n, V] (f64 host only, f32, bf16) are replaced by their
/// gradient,
///   dlogits = (softmax(z) − onehot(label)) · scale,
/// where scale is 1 / (tokens with a label in the whole batch).
/// A recorded graph may read it at each replay (core/argument.h).
/// The host throws ShapeError on a label outside [0, V); on cuda its loss is NaN.
void cross_entropy(const View& loss_sum, const View& logits, const ConstView& labels,
                   Argument<double> scale, Context& ctx);

/// losses [n] f32 (f64 for f64), nothing else; for validation and inference.
void token_losses(const View& losses, const ConstView& logits, const ConstView& labels,
                  Stream& stream);

// -- A vocabulary split over ranks: each holds logits [n, V] of its part, which begins at `first`.
// Ranks share three numbers a row (statistics, gathered in rank order); what is made of them is the
// same on every rank.

/// statistics [3, n] f64: each row's maximum, Σ_v exp(z − maximum), and the label's logit, or 0
/// where the label is not in this part. labels are of the whole `vocabulary`, none is kNoLoss
/// (host: ShapeError outside it; cuda: NaN).
void softmax_statistics(const View& statistics, const ConstView& logits, const ConstView& labels,
                        int64_t first, int64_t vocabulary, Stream& stream);
/// losses [n] as token_losses; statistics [p, 3, n] of all parts.
void losses_of_statistics(const View& losses, const ConstView& statistics, Stream& stream);
/// logits are replaced by this part of (softmax(z) − onehot(label)) · scale.
void cross_entropy_gradient(const View& logits, const ConstView& statistics,
                            const ConstView& labels, int64_t first, Argument<double> scale,
                            Stream& stream);

}  // namespace rowshard
