#include "model/decoder_block.h"

#include <cmath>

#include "layers/elementwise.h"
#include "layers/rms_norm.h"
#include "layers/swiglu.h"

namespace rowshard {

namespace {

// The row statistics of f64 tensors are f64, of all others f32.
DType statistics(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

Dropout dropout_of(const BlockAdapters& adapters, int index) {
  Dropout dropout = adapters.dropout;
  dropout.random.stream += index;
  return dropout;
}

struct Scratch {
  Context& ctx;
  DType dtype;

  Tensor operator()(const char* name, int64_t rows, int64_t cols) const {
    return ctx.arena.tensor(Category::kActivations, name, dtype, {rows, cols});
  }
};

// Forward of the projections that read one normalised input.
struct Projection {
  int index;
  const View* y;
};

void project(std::initializer_list<Projection> projections, const ConstView& x,
             const BlockWeights& weights, const BlockAdapters& adapters, BlockSaved& saved,
             Context& ctx) {
  const Projection* first = projections.begin();
  const auto at = [&](size_t i) { return &weights.linear[(first + i)->index]; };
  const QuantizedInput x8 = projections.size() == 3 ? quantize_input(x, {at(0), at(1), at(2)}, ctx)
                            : projections.size() == 2 ? quantize_input(x, {at(0), at(1)}, ctx)
                                                      : quantize_input(x, {at(0)}, ctx);
  for (const Projection& projection : projections) {
    const int i = projection.index;
    linear_forward(*projection.y, x, x8, weights.linear[i], adapters.linear[i],
                   dropout_of(adapters, i), &saved.linear[i], ctx);
    saved.linear[i].x = ConstView();  // x is not kept: backward makes it again
  }
}

void head_norm(const View& y, Tensor& raw, Tensor& rstd, const ConstView& weight, int64_t heads,
               double eps, Context& ctx) {
  const int64_t tokens = y.dim(0), head_dim = weight.dim(0);
  raw = ctx.arena.tensor(Category::kActivations, "block.raw", y.dtype, y.shape);
  copy(raw, y, ctx.stream);
  rstd = ctx.arena.tensor(Category::kActivations, "block.head_rstd", statistics(y.dtype),
                          {tokens * heads});
  rms_norm(y.reshape({tokens * heads, head_dim}), rstd,
           raw.view().reshape({tokens * heads, head_dim}), weight, eps, ctx.stream);
}

}  // namespace

void block_forward(const View& y, const BlockShape& s, const BlockWeights& weights,
                   const BlockAdapters& adapters, const Segments& segments, const RopeTable& table,
                   BlockSaved& saved, Context& ctx) {
  const View x = saved.x;
  const int64_t tokens = x.dim(0);
  const Scratch make{ctx, x.dtype};
  const auto row_statistics = [&](const char* name) {
    return ctx.arena.tensor(Category::kActivations, name, statistics(x.dtype), {tokens});
  };
  {
    Tensor normed = make("block.normed", tokens, s.hidden);
    saved.input_rstd = row_statistics("block.input_rstd");
    rms_norm(normed, saved.input_rstd, x, weights.input_norm, s.rms_norm_eps, ctx.stream);
    saved.q = make("block.q", tokens, s.heads * s.head_dim);
    saved.k = make("block.k", tokens, s.kv_heads * s.head_dim);
    saved.v = make("block.v", tokens, s.kv_heads * s.head_dim);
    project({{kQ, &saved.q.view()}, {kK, &saved.k.view()}, {kV, &saved.v.view()}}, normed, weights,
            adapters, saved, ctx);
  }
  if (weights.q_norm.data) {
    head_norm(saved.q, saved.q_raw, saved.q_rstd, weights.q_norm, s.heads, s.rms_norm_eps, ctx);
    head_norm(saved.k, saved.k_raw, saved.k_rstd, weights.k_norm, s.kv_heads, s.rms_norm_eps, ctx);
  }
  const View q = saved.q.view().reshape({tokens, s.heads, s.head_dim});
  const View k = saved.k.view().reshape({tokens, s.kv_heads, s.head_dim});
  const View v = saved.v.view().reshape({tokens, s.kv_heads, s.head_dim});
  rope(q, segments.positions(), table, RopeDirection::kForward, ctx.stream);
  rope(k, segments.positions(), table, RopeDirection::kForward, ctx.stream);

  saved.o = make("block.o", tokens, s.heads * s.head_dim);
  saved.lse =
      ctx.arena.tensor(Category::kActivations, "block.lse", statistics(x.dtype), {s.heads, tokens});
  attention(saved.o.view().reshape(q.shape), saved.lse, q, k, v, segments,
            1.0 / std::sqrt(static_cast<double>(s.head_dim)), ctx);

  saved.mid = make("block.mid", tokens, s.hidden);
  project({{kO, &saved.mid.view()}}, saved.o, weights, adapters, saved, ctx);
  add(saved.mid, saved.mid, x, ctx.stream);

  saved.gate = make("block.gate", tokens, s.ffn);
  saved.up = make("block.up", tokens, s.ffn);
  {
    Tensor normed = make("block.normed", tokens, s.hidden);
    saved.post_rstd = row_statistics("block.post_rstd");
    rms_norm(normed, saved.post_rstd, saved.mid, weights.post_norm, s.rms_norm_eps, ctx.stream);
    project({{kGate, &saved.gate.view()}, {kUp, &saved.up.view()}}, normed, weights, adapters,
            saved, ctx);
  }
  Tensor product = make("block.swiglu", tokens, s.ffn);
  swiglu(product, saved.gate, saved.up, ctx.stream);
  project({{kDown, &y}}, product, weights, adapters, saved, ctx);
  add(y, y, saved.mid, ctx.stream);
}

void block_backward(const View& dx, const BlockShape& s, const BlockWeights& weights,
                    const BlockAdapters& adapters, const Segments& segments, const RopeTable& table,
                    BlockSaved& saved, bool need_dx, ColumnwisePolicy policy, Context& ctx) {
  const int64_t tokens = dx.dim(0);
  const Scratch make{ctx, dx.dtype};
  const View none;
  const auto backward = [&](int index, const View& d_input, const ConstView& dy,
                            const ConstView& input, bool accumulate) {
    if (adapters.linear[index])
      saved.linear[index].x = input;
    linear_backward(d_input, dy, saved.linear[index], weights.linear[index], adapters.linear[index],
                    accumulate, policy, ctx);
  };
  // Below this half only the attention's own adapters, or blocks further down, want a gradient.
  const bool need_mid = need_dx || adapters.any_attention();
  const bool need_ffn = need_mid || adapters.linear[kGate] || adapters.linear[kUp];

  {  // y = mid + swiglu(gate, up)·W_downᵀ
    Tensor product = make("block.swiglu", tokens, s.ffn);
    if (adapters.linear[kDown])
      swiglu(product, saved.gate, saved.up, ctx.stream);
    Tensor d_product = make("block.d_swiglu", need_ffn ? tokens : 0, s.ffn);
    backward(kDown, need_ffn ? d_product.view() : none, dx, product, false);
    if (!need_ffn)
      return;
    product.reset();
    Tensor d_gate = make("block.d_gate", tokens, s.ffn);
    const View d_up = d_product;  // read before it is written, element by element
    swiglu_backward(d_gate, d_up, d_product, saved.gate, saved.up, ctx.stream);
    saved.gate.reset();
    saved.up.reset();

    Tensor normed = make("block.normed", tokens, s.hidden);
    if (adapters.linear[kGate] || adapters.linear[kUp]) {
      Tensor rstd = ctx.arena.tensor(Category::kActivations, "block.rstd_again",
                                     statistics(dx.dtype), {tokens});
      rms_norm(normed, rstd, saved.mid, weights.post_norm, s.rms_norm_eps, ctx.stream);
    }
    Tensor d_normed = make("block.d_normed", need_mid ? tokens : 0, s.hidden);
    const View d_target = need_mid ? d_normed.view() : none;
    backward(kGate, d_target, d_gate, normed, false);
    backward(kUp, d_target, d_up, normed, true);
    if (!need_mid)
      return;
    rms_norm_backward(dx, d_normed, saved.mid, weights.post_norm, saved.post_rstd, true, none, ctx);
    saved.mid.reset();
  }

  // mid = x + attention(...)·W_oᵀ
  const Shape q_shape{tokens, s.heads, s.head_dim};
  const Shape kv_shape{tokens, s.kv_heads, s.head_dim};
  const bool need_qkv =
      need_dx || adapters.linear[kQ] || adapters.linear[kK] || adapters.linear[kV];
  Tensor d_o = make("block.d_o", need_qkv ? tokens : 0, s.heads * s.head_dim);
  backward(kO, need_qkv ? d_o.view() : none, dx, saved.o, false);
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
    const auto norm_backward = [&](const View& d, const Tensor& raw, const Tensor& rstd,
                                   const ConstView& weight) {
      const Shape rows{d.elements() / s.head_dim, s.head_dim};
      rms_norm_backward(d.reshape(rows), d.reshape(rows), raw.view().reshape(rows), weight, rstd,
                        false, none, ctx);
    };
    norm_backward(d_q, saved.q_raw, saved.q_rstd, weights.q_norm);
    norm_backward(d_k, saved.k_raw, saved.k_rstd, weights.k_norm);
  }

  Tensor normed = make("block.normed", tokens, s.hidden);
  if (adapters.linear[kQ] || adapters.linear[kK] || adapters.linear[kV]) {
    Tensor rstd = ctx.arena.tensor(Category::kActivations, "block.rstd_again", statistics(dx.dtype),
                                   {tokens});
    rms_norm(normed, rstd, saved.x, weights.input_norm, s.rms_norm_eps, ctx.stream);
  }
  Tensor d_normed = make("block.d_normed", need_dx ? tokens : 0, s.hidden);
  const View d_target = need_dx ? d_normed.view() : none;
  backward(kQ, d_target, d_q, normed, false);
  backward(kK, d_target, d_k, normed, true);
  backward(kV, d_target, d_v, normed, true);
  if (!need_dx)
    return;
  rms_norm_backward(dx, d_normed, saved.x, weights.input_norm, saved.input_rstd, true, none, ctx);
}

}  // namespace rowshard
