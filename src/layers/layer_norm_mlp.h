// A norm and the MLP that reads it:  h = norm(x),  y = down(act(gate(h), up(h))),  or without up:
// y = down(gelu(gate(h))).
//
// The activation leaves FP8 codes straight from its kernel when that is all `down` takes. Kept for
// backward are x, the norm's statistics and the outputs of gate and up; h and the activation are
// made again where something reads them. Contracts are those of layers/linear.h.
#pragma once

#include "layers/activation.h"
#include "layers/layer_norm_linear.h"

namespace rowshard {

/// Owns nothing.
struct LayerNormMlp {
  Norm norm;
  NormGradients norm_gradients = {};
  Activation activation = Activation::kSwiGlu;
  std::array<Linear, 2> first;  // gate and up; for kGelu only the first
  Linear down;

  LayerNormLinear first_layer() const {
    return {norm, norm_gradients,
            std::span<const Linear>(first).first(is_gated(activation) ? 2 : 1)};
  }
};

struct LayerNormMlpSaved {
  LayerNormLinearSaved first;
  Tensor gate, up;              // [T, F]
  Tensor d_gate, d_activation;  // [T, F], while gradients of weights wait for them
  LinearSaved down;
};

/// y [T, N] from x [T, H].
void layer_norm_mlp_forward(const View& y, const ConstView& x, const LayerNormMlp& layer,
                            LayerNormMlpSaved* saved, Context& ctx);

/// dx [T, H] from dy [T, N], or dx += with accumulate_dx; then dx may be dy, the gradient of a
/// residual path. dx without data: nothing below wants a gradient.
void layer_norm_mlp_backward(const View& dx, const ConstView& dy, LayerNormMlpSaved& saved,
                             const LayerNormMlp& layer, bool accumulate_dx, Context& ctx);

/// Those weight gradients that backward has delayed. dy of `down` must still be there.
void layer_norm_mlp_weight_gradient(LayerNormMlpSaved& saved, const LayerNormMlp& layer,
                                    Context& ctx);

}  // namespace rowshard
