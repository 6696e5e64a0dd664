#include "model/decoder_block.h"

#include <cmath>

#include "layers/elementwise.h"

namespace rowshard {

namespace {

Norm rms(const ConstView& weight, const BlockShape& shape) {
  return {.kind = NormKind::kRms, .weight = weight, .bias = {}, .eps = shape.rms_norm_eps};
}

/// The layers of one block in this step.
struct BlockLayers {
  std::array<Linear, kLinearCount> linear;
  LayerNormLinear qkv;
  LayerNormMlp mlp;

  BlockLayers(const BlockShape& shape, const BlockWeights& weights, const BlockAdapters& adapters,
              ColumnwisePolicy policy) {
    for (int i = 0; i < kLinearCount; ++i) {
      linear[i].weight = &weights.linear[i];
      linear[i].lora = adapters.linear[i];
      linear[i].dropout = adapters.dropout;
      linear[i].dropout.random.stream += i;
      linear[i].columnwise = policy;
    }
    linear[kO].dropout.first_column = shape.first_head * shape.head_dim;
    linear[kO].dropout.columns = shape.all_heads * shape.head_dim;
    linear[kDown].dropout.first_column = shape.first_ffn;
    linear[kDown].dropout.columns = shape.all_ffn;
    qkv.norm = rms(weights.input_norm, shape);
    qkv.linears = std::span<const Linear>(linear).subspan(kQ, 3);
    mlp.norm = rms(weights.post_norm, shape);
    mlp.activation = Activation::kSwiGlu;
    mlp.first = {linear[kGate], linear[kUp]};
    mlp.down = linear[kDown];
  }
  BlockLayers(const BlockLayers&) = delete;  // qkv points into linear
  BlockLayers& operator=(const BlockLayers&) = delete;
};

struct Scratch {
  Context& ctx;
  DType dtype;

  Tensor operator()(const char* name, int64_t rows, int64_t cols) const {
    return ctx.arena.tensor(Category::kActivations, name, dtype, {rows, cols});
  }
};

// The row statistics of f64 tensors are f64, of all others f32.
DType statistics(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

void head_norm(const View& y, Tensor& raw, Tensor& rstd, const Norm& norm, int64_t heads,
               Context& ctx) {
  const Shape rows{y.dim(0) * heads, norm.weight.dim(0)};
  raw = ctx.arena.tensor(Category::kActivations, "block.raw", y.dtype, y.shape);
  copy(raw, y, ctx.stream);
  rstd =
      ctx.arena.tensor(Category::kActivations, "block.head_rstd", statistics(y.dtype), {rows[0]});
  norm_forward(y.reshape(rows), nullptr, rstd, raw.view().reshape(rows), norm, ctx.stream);
}

}  // namespace

void block_forward(const View& y, const BlockShape& s, const BlockWeights& weights,
                   const BlockAdapters& adapters, const Segments& segments, const RopeTable& table,
                   BlockSaved& saved, TensorParallel* tp, Context& ctx) {
  const View x = saved.x;
  const int64_t tokens = segments.tokens();
  const Scratch make{ctx, x.dtype};
  const BlockLayers layers(s, weights, adapters, ColumnwisePolicy::kRelease);
  saved.q = make("block.q", tokens, s.heads * s.head_dim);
  saved.k = make("block.k", tokens, s.kv_heads * s.head_dim);
  saved.v = make("block.v", tokens, s.kv_heads * s.head_dim);
  const std::array<View, 3> qkv{saved.q, saved.k, saved.v};
  if (tp) {
    parallel_norm_linear_forward(qkv, x, layers.qkv, saved.parallel_qkv, *tp, ctx);
  } else {
    layer_norm_linear_forward(qkv, x, layers.qkv, &saved.qkv, ctx);
  }
  if (weights.q_norm.data) {
    head_norm(saved.q, saved.q_raw, saved.q_rstd, rms(weights.q_norm, s), s.heads, ctx);
    head_norm(saved.k, saved.k_raw, saved.k_rstd, rms(weights.k_norm, s), s.kv_heads, ctx);
  }
  const View q = saved.q.view().reshape({tokens, s.heads, s.head_dim});
  const View k = saved.k.view().reshape({tokens, s.kv_heads, s.head_dim});
  const View v = saved.v.view().reshape({tokens, s.kv_heads, s.head_dim});
  rope(q, segments.positions(), table, RopeDirection::kForward, ctx.stream);
  rope(k, segments.positions(), table, RopeDirection::kForward, ctx.stream);

  saved.o = make("block.o", tokens, s.heads * s.head_dim);
  saved.lse =
      ctx.arena.tensor(Category::kActivations, "block.lse", statistics(x.dtype), {tokens, s.heads});
  attention(saved.o.view().reshape(q.shape), saved.lse, q, k, v, segments,
            1.0 / std::sqrt(static_cast<double>(s.head_dim)), ctx);

  saved.mid = make("block.mid", x.dim(0), s.hidden);
  if (tp) {
    row_parallel_forward(saved.mid, saved.o, {&layers.linear[kO], 1}, &saved.parallel_out, *tp,
                         ctx);
  } else {
    linear_forward(saved.mid, saved.o, layers.linear[kO], &saved.out, ctx);
  }
  add(saved.mid, saved.mid, x, ctx.stream);
  if (tp) {
    parallel_norm_mlp_forward(y, saved.mid, layers.mlp, saved.parallel_mlp, *tp, ctx);
  } else {
    layer_norm_mlp_forward(y, saved.mid, layers.mlp, &saved.mlp, ctx);
  }
  add(y, y, saved.mid, ctx.stream);
}

void block_backward(const View& dx, const BlockShape& s, const BlockWeights& weights,
                    const BlockAdapters& adapters, const Segments& segments, const RopeTable& table,
                    BlockSaved& saved, bool need_dx, ColumnwisePolicy policy, TensorParallel* tp,
                    Context& ctx) {
  const int64_t tokens = segments.tokens();
  const Scratch make{ctx, dx.dtype};
  const View none;
  const BlockLayers layers(s, weights, adapters, policy);
  // Below this half only the attention's own adapters, or blocks further down, want a gradient.
  const bool need_mid = need_dx || adapters.any_attention();
  const View d_mid = need_mid ? dx : none;
  if (tp) {
    parallel_norm_mlp_backward(d_mid, dx, saved.mid, layers.mlp, saved.parallel_mlp, *tp, ctx);
  } else {
    layer_norm_mlp_backward(d_mid, dx, saved.mlp, layers.mlp, true, ctx);
  }
  if (!need_mid)
    return;
  saved.mid.reset();

  // mid = x + attention(...)·W_oᵀ
  const Shape q_shape{tokens, s.heads, s.head_dim};
  const Shape kv_shape{tokens, s.kv_heads, s.head_dim};
  const bool need_qkv =
      need_dx || adapters.linear[kQ] || adapters.linear[kK] || adapters.linear[kV];
  Tensor d_o = make("block.d_o", need_qkv ? tokens : 0, s.heads * s.head_dim);
  const View d_out = need_qkv ? d_o.view() : none;
  if (tp) {
    row_parallel_backward(d_out, dx, saved.o, {&layers.linear[kO], 1}, saved.parallel_out, *tp,
                          ctx);
  } else {
    linear_backward(d_out, dx, saved.out, layers.linear[kO], false, ctx);
  }
  if (!need_qkv)
    return;

  Tensor d_q = make("block.d_q", tokens, s.heads * s.head_dim);
  Tensor d_k = make("block.d_k", tokens, s.kv_heads * s.head_dim);
  Tensor d_v = make("block.d_v", tokens, s.kv_heads * s.head_dim);
  const View dq = d_q.view().reshape(q_shape), dk = d_k.view().reshape(kv_shape);
  attention_backward(dq, dk, d_v.view().reshape(kv_shape), d_o.view().reshape(q_shape),
                     saved.q.view().reshape(q_shape), saved.k.view().reshape(kv_shape),
                     saved.v.view().reshape(kv_shape), saved.o.view().reshape(q_shape), saved.lse,
                     segments, 1.0 / std::sqrt(static_cast<double>(s.head_dim)), ctx);
  rope(dq, segments.positions(), table, RopeDirection::kBackward, ctx.stream);
  rope(dk, segments.positions(), table, RopeDirection::kBackward, ctx.stream);
  if (weights.q_norm.data) {
    const auto norm_of_heads = [&](const View& d, const Tensor& raw, const Tensor& rstd,
                                   const ConstView& weight) {
      const Shape rows{d.elements() / s.head_dim, s.head_dim};
      norm_backward(d.reshape(rows), d.reshape(rows), raw.view().reshape(rows), rms(weight, s),
                    rstd, false, {}, ctx);
    };
    norm_of_heads(d_q, saved.q_raw, saved.q_rstd, weights.q_norm);
    norm_of_heads(d_k, saved.k_raw, saved.k_rstd, weights.k_norm);
  }
  const std::array<ConstView, 3> d_qkv{d_q, d_k, d_v};
  const View d_x = need_dx ? dx : none;
  if (tp) {
    parallel_norm_linear_backward(d_x, d_qkv, saved.x, layers.qkv, saved.parallel_qkv, *tp, ctx);
  } else {
    layer_norm_linear_backward(d_x, d_qkv, saved.qkv, layers.qkv, true, ctx);
  }
}

}  // namespace rowshard
