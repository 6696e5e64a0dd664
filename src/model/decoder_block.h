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
#include "layers/parallel_modules.h"
#include "layers/rope.h"

namespace rowshard {

/// The order of ModelConfig::linears().
enum LinearIndex { kQ, kK, kV, kO, kGate, kUp, kDown, kLinearCount };

/// What of a block this rank computes: under tensor parallelism its own heads and part of the FFN.
struct BlockShape {
  int64_t hidden, ffn, heads, kv_heads, head_dim;
  double rms_norm_eps;
  // The first head and FFN feature in the whole model, and how many it has: dropout draws its masks
  // for the whole.
  int64_t first_head = 0, all_heads = 0;
  int64_t first_ffn = 0, all_ffn = 0;
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

/// What forward leaves for backward. T tokens, activations in the compute dtype. The residual
/// stream holds all tokens, or this rank's with sequence parallelism.
struct BlockSaved {
  Tensor x, mid;  // [residual rows, H] block input; the stream between the two halves
  LayerNormLinearSaved qkv;
  Tensor q_raw, k_raw;    // [T, heads·D] before q/k norm, only with q_norm
  Tensor q_rstd, k_rstd;  // [T·heads], only with q_norm
  Tensor q, k, v, o;      // [T, heads·D], after RoPE
  Tensor lse;             // [T, heads]
  LinearSaved out;
  LayerNormMlpSaved mlp;
  // Under tensor parallelism, in place of qkv, out and mlp.
  ParallelNormSaved parallel_qkv;
  ParallelSaved parallel_out;
  ParallelMlpSaved parallel_mlp;
};

/// y [residual rows, H] from saved.x, which the caller has filled. Everything else of `saved` is
/// made here. tp null: one rank computes the block.
void block_forward(const View& y, const BlockShape& shape, const BlockWeights& weights,
                   const BlockAdapters& adapters, const Segments& segments, const RopeTable& rope,
                   BlockSaved& saved, TensorParallel* tp, Context& ctx);

/// dx [residual rows, H] holds dy on entry and dx on return; the adapters' gradients are added to.
/// With `need_dx` false (nothing below is trained) dx is left undefined and no work is done for it.
void block_backward(const View& dx, const BlockShape& shape, const BlockWeights& weights,
                    const BlockAdapters& adapters, const Segments& segments, const RopeTable& rope,
                    BlockSaved& saved, bool need_dx, ColumnwisePolicy policy, TensorParallel* tp,
                    Context& ctx);

}  // namespace rowshard
