// One decoder block, forward and backward by hand.
//
//   h = norm(x);  q, k, v = h·Wᵀ;  rope(q), rope(k);  o = attention(q, k, v);  m = x + o·W_oᵀ
//   h' = norm(m); gate, up = h'·Wᵀ;  y = m + swiglu(gate, up)·W_downᵀ
//
// The two halves are layers/layer_norm_linear.h with attention behind it, and
// layers/layer_norm_mlp.h. Every projection may carry an adapter. All weights are frozen, so
// backward produces dx and the adapters' gradients.
#pragma once

#include <array>

#include "layers/attention.h"
#include "layers/layer_norm_mlp.h"
#include "layers/rope.h"

namespace rowshard {

/// The order of ModelConfig::linears().
enum LinearIndex { kQ, kK, kV, kO, kGate, kUp, kDown, kLinearCount };

struct BlockShape {
  int64_t hidden, ffn, heads, kv_heads, head_dim;
  double rms_norm_eps;
};

/// The gathered weights of one block; views into its unit.
struct BlockWeights {
  ConstView input_norm, post_norm;  // [H]
  ConstView q_norm, k_norm;         // [D], or no data
  std::array<LinearWeight, kLinearCount> linear;
};

struct BlockAdapters {
  std::array<const LoraFactors*, kLinearCount> linear{};  // null: not adapted
  Dropout dropout;  // stream = a base the block offsets by the linear's index

  bool any_attention() const { return linear[kQ] || linear[kK] || linear[kV] || linear[kO]; }
};

/// What forward leaves for backward. T tokens, activations in the compute dtype.
struct BlockSaved {
  Tensor x, mid;  // [T, H] block input; residual stream between the two halves
  LayerNormLinearSaved qkv;
  Tensor q_raw, k_raw;    // [T, heads·D] before q/k norm, only with q_norm
  Tensor q_rstd, k_rstd;  // [T·heads], only with q_norm
  Tensor q, k, v, o;      // [T, heads·D], after RoPE
  Tensor lse;             // [T, heads]
  LinearSaved out;
  LayerNormMlpSaved mlp;
};

/// y [T, H] from saved.x, which the caller has filled. Everything else of `saved` is made here.
void block_forward(const View& y, const BlockShape& shape, const BlockWeights& weights,
                   const BlockAdapters& adapters, const Segments& segments, const RopeTable& rope,
                   BlockSaved& saved, Context& ctx);

/// dx [T, H] holds dy on entry and dx on return; the adapters' gradients are added to. With
/// `need_dx` false (nothing below is trained) dx is left undefined and no work is done for it.
void block_backward(const View& dx, const BlockShape& shape, const BlockWeights& weights,
                    const BlockAdapters& adapters, const Segments& segments, const RopeTable& rope,
                    BlockSaved& saved, bool need_dx, ColumnwisePolicy policy, Context& ctx);

}  // namespace rowshard
