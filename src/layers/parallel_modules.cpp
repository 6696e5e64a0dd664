#include "layers/parallel_modules.h"

#include "layers/dispatch.h"

namespace rowshard {

namespace {

bool any_adapter(std::span<const Linear> layers) {
  for (const Linear& layer : layers) {
    if (layer.lora)
      return true;
  }
  return false;
}

Tensor activations(const char* name, DType dtype, int64_t rows, int64_t cols, Context& ctx) {
  return ctx.arena.tensor(Category::kActivations, name, dtype, {rows, cols});
}

/// norm(x) as it is, as codes, or both.
struct Normed {
  Tensor plain;
  QuantizedActivation codes;
  Tensor statistics;

  Normed(const ConstView& x, const Norm& norm, bool as_is, bool quantized, Context& ctx) {
    if (as_is)
      plain = activations("tp.normed", x.dtype, x.dim(0), x.dim(1), ctx);
    if (quantized) {  // where they are sent from
      codes =
          allocate_rowwise(x.shape, Grouping::k1x128, Category::kCommunication, "tp.rows8", ctx);
    }
    statistics =
        ctx.arena.tensor(Category::kActivations, "tp.statistics", accumulator_dtype(x.dtype),
                         norm_statistics_shape(norm.kind, x.dim(0)));
    const Fp8View to = quantized ? codes.rowwise() : Fp8View();
    norm_forward(plain, quantized ? &to : nullptr, statistics, x, norm, ctx.stream);
  }
};

void check_frozen(const NormGradients& gradients, const char* operation) {
  ROWSHARD_CHECK(!gradients.wanted(), LogicError, operation,
                 ": norms of a tensor-parallel layer are frozen");
}

std::span<const Linear> first_linears(const LayerNormMlp& layer) {
  return std::span<const Linear>(layer.first).first(is_gated(layer.activation) ? 2 : 1);
}

}  // namespace

void parallel_norm_linear_forward(std::span<const View> ys, const ConstView& x,
                                  const LayerNormLinear& layer, ParallelNormSaved& saved,
                                  TensorParallel& tp, Context& ctx) {
  check_frozen(layer.norm_gradients, "parallel_norm_linear_forward");
  const bool fp8 = layer.linears[0].weight->quantized() != nullptr;
  Normed normed(x, layer.norm, !fp8 || any_adapter(layer.linears), fp8, ctx);
  saved.statistics = std::move(normed.statistics);
  const ConstView plain =
      normed.plain ? ConstView(normed.plain) : ConstView(nullptr, x.dtype, x.shape, x.device);
  column_parallel_forward(ys, plain, layer.linears, &saved.linears, tp, ctx, {},
                          std::move(normed.codes));
}

void parallel_norm_linear_backward(const View& dx, std::span<const ConstView> dys,
                                   const ConstView& x, const LayerNormLinear& layer,
                                   const ParallelNormSaved& saved, TensorParallel& tp,
                                   Context& ctx) {
  const bool wanted = dx.data != nullptr;
  Tensor normed, d_normed;
  if (any_adapter(layer.linears))
    normed = std::move(Normed(x, layer.norm, true, false, ctx).plain);
  if (wanted)
    d_normed = activations("tp.d_normed", x.dtype, x.dim(0), x.dim(1), ctx);
  column_parallel_backward(wanted ? d_normed.view() : View(), dys, normed, layer.linears,
                           saved.linears, tp, ctx);
  if (wanted)
    norm_backward(dx, d_normed, x, layer.norm, saved.statistics, true, {}, ctx);
}

void parallel_norm_mlp_forward(const View& y, const ConstView& x, const LayerNormMlp& layer,
                               ParallelMlpSaved& saved, TensorParallel& tp, Context& ctx) {
  const int64_t tokens = tp.sequence ? x.dim(0) * tp.size() : x.dim(0);
  const int64_t ffn = layer.down.weight->k;
  const bool gated = is_gated(layer.activation);
  saved.gate = activations("tp.gate", x.dtype, tokens, ffn, ctx);
  if (gated)
    saved.up = activations("tp.up", x.dtype, tokens, ffn, ctx);
  const std::array<View, 2> outputs{saved.gate, saved.up};
  parallel_norm_linear_forward(std::span(outputs).first(gated ? 2 : 1), x,
                               {layer.norm, layer.norm_gradients, first_linears(layer)},
                               saved.first, tp, ctx);
  const Tensor product = activations("tp.activation", x.dtype, tokens, ffn, ctx);
  activation_forward(product, nullptr, saved.gate, saved.up, layer.activation, ctx.stream);
  row_parallel_forward(y, product, {&layer.down, 1}, &saved.down, tp, ctx);
}

void parallel_norm_mlp_backward(const View& dx, const ConstView& dy, const ConstView& x,
                                const LayerNormMlp& layer, ParallelMlpSaved& saved,
                                TensorParallel& tp, Context& ctx) {
  const int64_t tokens = saved.gate.shape()[0], ffn = layer.down.weight->k;
  const bool gated = is_gated(layer.activation);
  const bool need_first = dx.data || any_adapter(first_linears(layer));
  Tensor product, d_product;
  if (layer.down.lora) {
    product = activations("tp.activation", x.dtype, tokens, ffn, ctx);
    activation_forward(product, nullptr, saved.gate, saved.up, layer.activation, ctx.stream);
  }
  if (need_first)
    d_product = activations("tp.d_activation", x.dtype, tokens, ffn, ctx);
  row_parallel_backward(need_first ? d_product.view() : View(), dy, product, {&layer.down, 1},
                        saved.down, tp, ctx);
  if (!need_first)
    return;
  product.reset();
  const Tensor d_gate = activations("tp.d_gate", x.dtype, tokens, ffn, ctx);
  // Each element is read before it is written.
  const View d_up = gated ? d_product.view() : View();
  activation_backward(d_gate, d_up, d_product, saved.gate, saved.up, layer.activation, ctx.stream);
  saved.gate.reset();
  saved.up.reset();
  const std::array<ConstView, 2> gradients{d_gate, d_up};
  parallel_norm_linear_backward(dx, std::span(gradients).first(gated ? 2 : 1), x,
                                {layer.norm, layer.norm_gradients, first_linears(layer)},
                                saved.first, tp, ctx);
}

}  // namespace rowshard
