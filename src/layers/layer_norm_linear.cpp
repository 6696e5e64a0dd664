#include "layers/layer_norm_linear.h"

#include "layers/dispatch.h"

namespace rowshard {

namespace {

std::optional<Grouping> grouping_of(std::span<const Linear> linears) {
  std::optional<Grouping> result;
  for (const Linear& linear : linears) {
    if (const auto grouping = activation_grouping({&linears.front(), &linear}))
      result = grouping;
  }
  return result;
}

void check_layer(const char* operation, size_t results, const ConstView& x,
                 const LayerNormLinear& layer) {
  ROWSHARD_CHECK(!layer.linears.empty() && results == layer.linears.size(), ShapeError, operation,
                 ": ", results, " results for ", layer.linears.size(), " linear layers");
  for (const Linear& linear : layer.linears)
    ROWSHARD_CHECK(linear.weight, LogicError, operation, ": a layer without a weight");
  ROWSHARD_CHECK(x.shape.rank() == 2, ShapeError, operation, ": x must be [T, H]; got ",
                 describe(x));
}

Tensor make_statistics(const ConstView& x, const Norm& norm, Category category, Context& ctx) {
  return ctx.arena.tensor(category, "norm.statistics", accumulator_dtype(x.dtype),
                          norm_statistics_shape(norm.kind, x.dim(0)));
}

/// h in the asked forms.
void make_input(LinearInput& input, const ConstView& x, const Norm& norm, const View& statistics,
                bool plain, Usage x8, Category category, Context& ctx) {
  // Fused: rowwise 1×128 codes leave the norm's kernel. Other copies are quantised from h.
  const bool fused = x8.rowwise && input.x8.grouping == Grouping::k1x128;
  const bool needs_h = plain || x8.columnwise || (x8.rowwise && !fused);
  Tensor h;
  if (needs_h)
    h = ctx.arena.tensor(Category::kActivations, "norm.y", x.dtype, x.shape);
  Fp8View codes;
  if (fused && x.dim(0) > 0) {
    input.x8 = allocate_rowwise(x.shape, Grouping::k1x128, category, "linear.x8", ctx);
    codes = input.x8.rowwise();
  }
  norm_forward(h, codes.codes.data ? &codes : nullptr, statistics, x, norm, ctx.stream);
  quantize_activation(input.x8, h, x8, category, "linear.x8", ctx);
  input.x = plain ? ConstView(h) : ConstView(nullptr, x.dtype, x.shape, x.device);
  if (plain)
    input.owned = std::move(h);
}

}  // namespace

void layer_norm_linear_forward(std::span<const View> y, const ConstView& x,
                               const LayerNormLinear& layer, LayerNormLinearSaved* saved,
                               Context& ctx) {
  check_layer("layer_norm_linear_forward", y.size(), x, layer);
  LinearInput input;
  input.x8.grouping = grouping_of(layer.linears).value_or(Grouping::k1x128);
  bool plain = false;
  Usage x8;
  for (size_t i = 0; i < y.size(); ++i)
    check_forward(y[i], x, layer.linears[i], ctx);
  for (const Linear& linear : layer.linears) {
    const LinearPlan plan = plan_of(linear, saved != nullptr, true, true, ctx);
    plain = plain || plan.reads_x;
    x8.rowwise = x8.rowwise || plan.x8.rowwise;
  }
  Tensor statistics =
      make_statistics(x, layer.norm, saved ? Category::kActivations : Category::kWorkspace, ctx);
  if (x.dim(0) > 0)
    make_input(input, x, layer.norm, statistics, plain, x8, Category::kActivations, ctx);
  else
    input.x = x;
  if (saved) {
    *saved = {};
    saved->linears.resize(layer.linears.size());
  }
  for (size_t i = 0; i < y.size(); ++i) {
    project_forward(y[i], input, layer.linears[i], saved ? &saved->linears[i] : nullptr, ctx);
  }
  if (saved) {
    saved->x = x;
    saved->statistics = std::move(statistics);
  }
}

void layer_norm_linear_backward(const View& dx, std::span<const ConstView> dy,
                                LayerNormLinearSaved& saved, const LayerNormLinear& layer,
                                bool accumulate_dx, Context& ctx) {
  ROWSHARD_CHECK(saved.linears.size() == dy.size(), LogicError,
                 "layer_norm_linear_backward without a forward that saved: give "
                 "layer_norm_linear_forward a LayerNormLinearSaved");
  check_layer("layer_norm_linear_backward", dy.size(), saved.x, layer);
  const ConstView x = saved.x;
  check_operands(!dx.data || same_operands(x, {dx}), "layer_norm_linear_backward",
                 "dx like the x of forward", {{"dx", dx}, {"x", x}});
  const bool need_h_gradient = dx.data != nullptr || layer.norm_gradients.wanted();
  std::vector<LinearPlan> plans;
  auto input = std::make_shared<LinearInput>();
  input->x8.grouping = grouping_of(layer.linears).value_or(Grouping::k1x128);
  bool plain = false;
  Usage x8;
  for (size_t i = 0; i < dy.size(); ++i) {
    const Linear& linear = layer.linears[i];
    plans.push_back(plan_of(linear, true, need_h_gradient, true, ctx));
    check_backward(View(), dy[i], saved.linears[i], linear, plans[i], ctx);
    check_operands(dy[i].dim(0) == x.dim(0), "layer_norm_linear_backward", "dy of the rows of x",
                   {{"dy", dy[i]}, {"x", x}});
    const LinearPlan& plan = plans.back();
    plain = plain || (plan.x_again && (linear.lora || plan.x8_again == Usage{}));
    x8.rowwise = x8.rowwise || plan.x8_again.rowwise;
    x8.columnwise = x8.columnwise || plan.x8_again.columnwise;
  }
  if ((plain || !(x8 == Usage{})) && x.dim(0) > 0) {
    const Tensor again = make_statistics(x, layer.norm, Category::kWorkspace, ctx);
    make_input(*input, x, layer.norm, again, plain, x8, Category::kWorkspace, ctx);
  }
  Tensor d_h;
  if (need_h_gradient)
    d_h = ctx.arena.tensor(Category::kActivations, "norm.dy", x.dtype, x.shape);
  for (size_t i = 0; i < dy.size(); ++i) {
    project_backward(d_h, dy[i], input, saved.linears[i], layer.linears[i], plans[i], i > 0, ctx);
  }
  input.reset();
  if (need_h_gradient) {
    norm_backward(dx, d_h, x, layer.norm, saved.statistics, accumulate_dx, layer.norm_gradients,
                  ctx);
  }
}

void layer_norm_linear_weight_gradient(LayerNormLinearSaved& saved, const LayerNormLinear& layer,
                                       Context& ctx) {
  for (size_t i = 0; i < saved.linears.size(); ++i) {
    if (saved.linears[i].delayed.waiting)
      linear_weight_gradient(saved.linears[i], layer.linears[i], ctx);
  }
}

}  // namespace rowshard
