// Global-norm clipping as one factor on the device, which adamw.h applies: nothing rewrites the
// gradient, and the host never waits.
//
//   sum_of_squares(squares, part)      each rank: what it owns (layers/elementwise.h)
//   all-reduce of `squares`            over the ranks that own different parts
//   gradient_scale(result, squares)    the same factor on every rank
#pragma once

#include "core/view.h"

namespace rowshard {

/// result[0] = min(1, clip_norm / (norm + 1e-6)), the factor (as torch's clip_grad_norm_)
/// result[1] = norm = sqrt(squares), before clipping, for the report
///   result   [2] f32
///   squares  [1] f64, over all ranks
/// clip_norm = 0 never clips. A norm that is not finite gives a NaN factor: adamw then changes
/// nothing, and the caller sees the norm. Queued on the stream; may be captured.
void gradient_scale(const View& result, const ConstView& squares, double clip_norm, Stream& stream);

}  // namespace rowshard
