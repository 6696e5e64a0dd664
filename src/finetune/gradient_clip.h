// Global-norm clipping and token normalisation as one factor on the device, which adamw.h applies.
// The gradient vector is the sum over all valid tokens of all micro-batches and ranks; nothing
// rewrites it, and the host never waits.
//
//   sum_of_squares(squares, local gradients)     each rank: what it owns
//   all-reduce of `squares`                      the caller: over the ranks that own different
//   parts gradient_scale(result, squares, tokens, c)   the same factor on every rank
//
// Queued on ctx.stream; may be captured. Sums are f64 in an order that depends on n alone, so the
// same vector gives the same bits every time on one device.
#pragma once

#include "core/arena.h"

namespace rowshard {

/// squares = sum x², or squares += it with `accumulate`: a vector whose parts are owned by
/// different sets of ranks is summed part by part.
///   squares  [1] f32
///   x        [n] f32; n = 0 gives 0
void sum_of_squares(const View& squares, const ConstView& x, bool accumulate, Context& ctx);

/// result[0] = min(1, clip_norm / (norm + 1e-6)) / tokens, the factor (as torch's clip_grad_norm_)
/// result[1] = norm = sqrt(squares) / tokens, before clipping, for the report
///   result   [2] f32
///   squares  [1] f32, over all ranks
///   tokens   [1] f32, valid tokens of the step over all ranks; 0 gives a factor and norm of 0
/// clip_norm = 0 never clips. A norm that is not finite gives a NaN factor: adamw then changes
/// nothing, and the caller sees the norm.
void gradient_scale(const View& result, const ConstView& squares, const ConstView& tokens,
                    double clip_norm, Context& ctx);

}  // namespace rowshard
