// A norm and the linear layers that read it: q, k, v, or the gate and up of an MLP.
//
//   h = norm(x),  y_i = linear_i(h)
//
// h is made once: as FP8 codes straight from the norm's kernel when that is all its readers take,
// with the bf16 tensor beside them for an adapter or a plain weight. It is not saved: backward
// makes it again from x, where something reads it. Contracts are those of layers/linear.h.
#pragma once

#include <span>
#include <vector>

#include "layers/linear.h"
#include "layers/norm.h"

namespace rowshard {

/// Owns nothing.
struct LayerNormLinear {
  Norm norm;
  NormGradients norm_gradients = {};  // no data: the norm is frozen
  std::span<const Linear> linears;
};

struct LayerNormLinearSaved {
  ConstView x;        // [T, H], the caller's
  Tensor statistics;  // norm_statistics_shape
  std::vector<LinearSaved> linears;
};

/// y[i] [T, N_i] from x [T, H].
void layer_norm_linear_forward(std::span<const View> y, const ConstView& x,
                               const LayerNormLinear& layer, LayerNormLinearSaved* saved,
                               Context& ctx);

/// dx [T, H] from all dy[i] [T, N_i], or dx += with accumulate_dx (a residual's gradient is there).
/// dx without data: nothing below wants a gradient.
void layer_norm_linear_backward(const View& dx, std::span<const ConstView> dy,
                                LayerNormLinearSaved& saved, const LayerNormLinear& layer,
                                bool accumulate_dx, Context& ctx);

/// Those weight gradients that backward has delayed.
void layer_norm_linear_weight_gradient(LayerNormLinearSaved& saved, const LayerNormLinear& layer,
                                       Context& ctx);

}  // namespace rowshard
