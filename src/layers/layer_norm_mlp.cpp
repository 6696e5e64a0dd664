#include "layers/layer_norm_mlp.h"

#include <algorithm>
#include <array>

#include "layers/dispatch.h"

namespace rowshard {

namespace {

void check_layer(const char* operation, const LayerNormMlp& layer) {
  const bool gated = is_gated(layer.activation);
  ROWSHARD_CHECK(layer.first[0].weight && layer.down.weight && (layer.first[1].weight || !gated),
                 LogicError, operation, ": ", to_string(layer.activation), " needs the weights ",
                 gated ? "gate, up and down" : "of its first layer and down");
  const int64_t ffn = layer.down.weight->k;
  for (const Linear& linear : layer.first_layer().linears) {
    ROWSHARD_CHECK(linear.weight->n == ffn, ShapeError, operation, ": ", linear.weight->name, " [",
                   linear.weight->n, ", ", linear.weight->k, "] does not fit ",
                   layer.down.weight->name, " [", layer.down.weight->n, ", ", ffn, "]");
  }
}

/// The activation in the asked forms.
void make_activation(LinearInput& input, const ConstView& gate, const ConstView& up,
                     const LayerNormMlp& layer, bool plain, Usage x8, Category category,
                     Context& ctx) {
  const bool fused = x8.rowwise && input.x8.grouping == Grouping::k1x128;
  const bool needs_y = plain || x8.columnwise || (x8.rowwise && !fused);
  Tensor y;
  if (needs_y)
    y = ctx.arena.tensor(Category::kActivations, "mlp.activation", gate.dtype, gate.shape);
  Fp8View codes;
  if (fused) {
    input.x8 = allocate_rowwise(gate.shape, Grouping::k1x128, category, "linear.x8", ctx);
    codes = input.x8.rowwise();
  }
  activation_forward(y, fused ? &codes : nullptr, gate, up, layer.activation, ctx.stream);
  quantize_activation(input.x8, y, x8, category, "linear.x8", ctx);
  input.x = plain ? ConstView(y) : ConstView(nullptr, gate.dtype, gate.shape, gate.device);
  if (plain)
    input.owned = std::move(y);
}

}  // namespace

void layer_norm_mlp_forward(const View& y, const ConstView& x, const LayerNormMlp& layer,
                            LayerNormMlpSaved* saved, Context& ctx) {
  check_layer("layer_norm_mlp_forward", layer);
  const bool gated = is_gated(layer.activation);
  const int64_t tokens = x.dim(0), ffn = layer.down.weight->k;
  const auto make = [&](const char* name, int64_t rows) {
    return ctx.arena.tensor(Category::kActivations, name, x.dtype, {rows, ffn});
  };
  const ConstView hidden(nullptr, x.dtype, {tokens, ffn}, x.device);
  for (const Linear& linear : layer.first_layer().linears)
    check_forward(hidden, x, linear, ctx);
  check_forward(y, hidden, layer.down, ctx);
  Tensor gate = make("mlp.gate", tokens), up;
  if (gated)
    up = make("mlp.up", tokens);
  const std::array<View, 2> first{gate, up};
  layer_norm_linear_forward(std::span(first).first(gated ? 2 : 1), x, layer.first_layer(),
                            saved ? &saved->first : nullptr, ctx);
  LinearInput input;
  input.x = gate;
  if (tokens > 0) {
    const LinearPlan plan = plan_of(layer.down, saved != nullptr, true, true, ctx);
    input.x8.grouping = activation_grouping({&layer.down}).value_or(Grouping::k1x128);
    make_activation(input, gate, up, layer, plan.reads_x, plan.x8, Category::kActivations, ctx);
  }
  project_forward(y, input, layer.down, saved ? &saved->down : nullptr, ctx);
  if (saved) {
    saved->gate = std::move(gate);
    saved->up = std::move(up);
  }
}

void layer_norm_mlp_backward(const View& dx, const ConstView& dy, LayerNormMlpSaved& saved,
                             const LayerNormMlp& layer, bool accumulate_dx, Context& ctx) {
  check_layer("layer_norm_mlp_backward", layer);
  ROWSHARD_CHECK(saved.gate.shape().rank() == 2 && !saved.first.linears.empty(), LogicError,
                 "layer_norm_mlp_backward without a forward that saved, or the second after one: "
                 "give layer_norm_mlp_forward a LayerNormMlpSaved before each");
  const bool gated = is_gated(layer.activation);
  const LayerNormLinear first = layer.first_layer();
  const bool need_h = dx.data != nullptr || layer.norm_gradients.wanted();
  bool need_first = need_h;
  for (const Linear& linear : first.linears) {
    need_first = need_first || linear.lora || linear.weight->trainable() ||
                 linear.weight->bias_gradient.data;
  }
  const int64_t tokens = saved.gate.shape()[0], ffn = layer.down.weight->k;
  const auto make = [&](const char* name) {
    return ctx.arena.tensor(Category::kActivations, name, dy.dtype, {tokens, ffn});
  };
  const LinearPlan plan = plan_of(layer.down, true, need_first, true, ctx);
  // All layers before the first is run.
  check_operands((!dx.data || same_operands(saved.first.x, {dx})) && dy.dim(0) == tokens,
                 "layer_norm_mlp_backward", "dx like the x of forward, dy of its rows",
                 {{"dx", dx}, {"dy", dy}, {"x", saved.first.x}});
  check_backward(View(), dy, saved.down, layer.down, plan, ctx);
  const ConstView hidden(nullptr, dy.dtype, {tokens, ffn}, dy.device);
  for (size_t i = 0; i < first.linears.size(); ++i) {
    const LinearPlan plan_first = plan_of(first.linears[i], true, need_h, true, ctx);
    check_backward(View(), hidden, saved.first.linears[i], first.linears[i], plan_first, ctx);
  }
  auto input = std::make_shared<LinearInput>();
  input->x8.grouping = activation_grouping({&layer.down}).value_or(Grouping::k1x128);
  if (plan.x_again && tokens > 0) {
    make_activation(*input, saved.gate, saved.up, layer,
                    layer.down.lora || plan.x8_again == Usage{}, plan.x8_again,
                    Category::kWorkspace, ctx);
  }
  Tensor d_activation;
  if (need_first)
    d_activation = make("mlp.d_activation");
  project_backward(d_activation, dy, input, saved.down, layer.down, plan, false, ctx);
  input.reset();
  if (!need_first)
    return;
  Tensor d_gate;
  if (gated)
    d_gate = make("mlp.d_gate");
  // In place, element by element: the other half takes the memory of what it is made from.
  const std::array<ConstView, 2> d_first{gated ? d_gate.view() : d_activation.view(),
                                         gated ? d_activation.view() : View()};
  activation_backward(gated ? d_gate.view() : d_activation.view(),
                      gated ? d_activation.view() : View(), d_activation, saved.gate, saved.up,
                      layer.activation, ctx.stream);
  saved.gate.reset();
  saved.up.reset();
  layer_norm_linear_backward(dx, std::span(d_first).first(gated ? 2 : 1), saved.first, first,
                             accumulate_dx, ctx);
  if (std::ranges::any_of(saved.first.linears,
                          [](const LinearSaved& linear) { return linear.delayed.waiting; })) {
    saved.d_gate = std::move(d_gate);
    saved.d_activation = std::move(d_activation);
  }
}

void layer_norm_mlp_weight_gradient(LayerNormMlpSaved& saved, const LayerNormMlp& layer,
                                    Context& ctx) {
  layer_norm_linear_weight_gradient(saved.first, layer.first_layer(), ctx);
  saved.d_gate.reset();
  saved.d_activation.reset();
  if (saved.down.delayed.waiting)
    linear_weight_gradient(saved.down, layer.down, ctx);
}

}  // namespace rowshard
