#include "layers/linear.h"

#include "core/matmul.h"
#include "core/trace.h"
#include "fp8/dgrad_rowwise.h"
#include "fp8/gemm.h"
#include "fp8/quantize.h"
#include "layers/column_sum.h"
#include "layers/dispatch.h"
#include "layers/elementwise.h"

namespace rowshard {

namespace {

/// Activations of an MX weight are MX too; all others are 1×128.
Grouping grouping_beside(const Fp8Matrix& weight) {
  return is_mx(weight.grouping()) ? Grouping::kMx1x32 : Grouping::k1x128;
}

/// The weight in the dtype of x: itself, converted into scratch, or FP8 codes dequantised.
struct PlainWeight {
  Tensor scratch;
  ConstView view;

  PlainWeight(const LinearWeight& weight, bool from_codes, DType dtype, Context& ctx)
      : view(weight.plain) {
    if (!from_codes && weight.plain.dtype == dtype)
      return;
    scratch =
        ctx.arena.tensor(Category::kWorkspace, "linear.converted", dtype, {weight.n, weight.k});
    if (from_codes) {
      dequantize(scratch, weight.quantized()->rowwise(), ctx.stream);
    } else {
      convert(scratch, view, ctx.stream);
    }
    view = scratch;
  }
};

void check_linear(const char* operation, const Linear& linear, const ConstView& y,
                  const ConstView& x, Context& ctx) {
  ROWSHARD_CHECK(linear.weight, LogicError, operation, ": a layer without a weight");
  const LinearWeight& weight = *linear.weight;
  check_weight(operation, weight);
  const Fp8Matrix* fp8 = weight.quantized();
  const bool fit = x.shape.rank() == 2 && y.shape.rank() == 2 && x.dim(0) == y.dim(0) &&
                   x.dim(1) == weight.k && y.dim(1) == weight.n && x.dtype == y.dtype &&
                   is_float_dtype(x.dtype) && !(fp8 && x.dtype == DType::kF64);
  ROWSHARD_CHECK(fit, ShapeError, operation, ": ", weight.name, " [", weight.n, ", ", weight.k,
                 fp8 ? "] fp8" : "] plain", " takes x [T, K] and y [T, N] of one dtype; got x ",
                 describe(x), ", y ", describe(y));
  const Device weight_device = fp8 ? fp8->device() : weight.plain.device;
  ROWSHARD_CHECK(
      x.device == ctx.device() && y.device == ctx.device() && weight_device == ctx.device(),
      ShapeError, operation, ": ", weight.name, " is on ", weight_device, ", x on ", x.device,
      ", y on ", y.device, ", the stream on ", ctx.device(), "; all must be on one device");
  ROWSHARD_CHECK(
      !weight.bias.data || (weight.bias.shape == Shape{weight.n} && weight.bias.dtype == y.dtype),
      ShapeError, operation, ": the bias of ", weight.name, " must be [", weight.n,
      "] in the dtype of y; got ", describe(weight.bias));
}

/// cuBLASLt adds a bf16 bias only.
bool product_adds_bias(const ConstView& bias, Context& ctx) {
  const bool on_cuda = ctx.device().is_cuda() || (ctx.device().is_plan() && ctx.device().index > 0);
  return bias.data != nullptr && (!on_cuda || bias.dtype == DType::kBF16);
}

void base_forward(const View& y, const LinearInput& input, const LinearWeight& weight,
                  Context& ctx) {
  const TraceSpan span(ctx.stream, TraceLane::kCompute,
                       Trace::active() ? weight.name + " fprop" : std::string());
  const bool biased = weight.bias.data != nullptr;
  if (const Fp8Matrix* fp8 = weight.quantized()) {
    GemmOptions options;
    if (product_adds_bias(weight.bias, ctx)) {
      options.bias = weight.bias;
    } else if (biased) {
      broadcast_row(y, weight.bias, ctx.stream);
      options.beta = 1;
    }
    fp8_gemm(y, input.x8.rowwise(), fp8->rowwise(), options, ctx);
    return;
  }
  const PlainWeight plain(weight, false, y.dtype, ctx);
  if (biased)
    broadcast_row(y, weight.bias, ctx.stream);
  matmul(y, input.x, Transpose::kNo, plain.view, Transpose::kYes, 1, biased ? 1 : 0, ctx);
}

/// dgrad, and the columnwise copy's life around it.
void base_backward(const View& dx, const ConstView& dy, const QuantizedActivation& dy8,
                   const Linear& linear, const LinearPlan& plan, float beta, Context& ctx) {
  const LinearWeight& weight = *linear.weight;
  const TraceSpan span(ctx.stream, TraceLane::kCompute,
                       Trace::active() ? weight.name + " dgrad" : std::string());
  DgradSource source = plan.dgrad;
  if (source == DgradSource::kAuto)
    source = dy.dim(0) <= kDirectTokens ? DgradSource::kDirect : DgradSource::kRebuild;
  switch (source) {
    case DgradSource::kNone:
    case DgradSource::kAuto:
      break;
    case DgradSource::kDirect:
      fp8_dgrad_rowwise(dx, dy8.rowwise(), weight.quantized()->rowwise(), beta, ctx);
      break;
    case DgradSource::kPlain: {
      const bool from_codes =
          weight.quantized() &&
          (!weight.plain.data || linear.backward_override == BackwardOverride::kDequantized);
      const PlainWeight plain(weight, from_codes, dy.dtype, ctx);
      matmul(dx, dy, Transpose::kNo, plain.view, Transpose::kNo, 1, beta, ctx);
      break;
    }
    case DgradSource::kColumnwise:
    case DgradSource::kRebuild: {
      Fp8Matrix& matrix = *weight.quantized();
      // The quantiser of dy was the last to be queued, and touches neither copy of the weight.
      const bool beside = plan.dy8 == Usage{true, false} && !Trace::active();
      matrix.update_usage(std::nullopt, true, ctx,
                          beside ? RebuildStart::kBesideQuantizer : RebuildStart::kInOrder);
      if (plan.pin)
        matrix.pin_columnwise(true);
      fp8_gemm(dx, dy8.rowwise(), matrix.columnwise(), {.beta = beta, .bias = std::nullopt}, ctx);
      break;
    }
  }
}

/// Right after dgrad, or in its place where no token came.
void release_columnwise(const Linear& linear, const LinearPlan& plan, Context& ctx) {
  if (plan.release && linear.weight->quantized()->columnwise_bytes() > 0)
    linear.weight->quantized()->update_usage(std::nullopt, false, ctx);
}

/// dW [N, K] = dyᵀ · x, onto what is there when accumulating.
void weight_gradient(const ConstView& dy, const QuantizedActivation& dy8, const LinearInput& input,
                     const Linear& linear, Context& ctx) {
  const LinearWeight& weight = *linear.weight;
  const TraceSpan span(ctx.stream, TraceLane::kCompute,
                       Trace::active() ? weight.name + " wgrad" : std::string());
  const float beta = weight.accumulate_gradient ? 1 : 0;
  if (dy8.usage().columnwise) {
    fp8_gemm(weight.gradient, dy8.columnwise(), input.x8.columnwise(),
             {.beta = beta, .bias = std::nullopt}, ctx);
    return;
  }
  ConstView x = input.x;
  Tensor scratch;
  if (linear.backward_override == BackwardOverride::kDequantized && weight.quantized()) {
    scratch = ctx.arena.tensor(Category::kWorkspace, "linear.x", dy.dtype, {dy.dim(0), weight.k});
    dequantize(scratch, input.x8.rowwise(), ctx.stream);
    x = scratch;
  }
  matmul(weight.gradient, dy, Transpose::kYes, x, Transpose::kNo, 1, beta, ctx);
}

/// What no operand can mend: a policy or a capture that this backward cannot have.
void check_plan(const Linear& linear, const LinearPlan& plan, Context& ctx) {
  const LinearWeight& weight = *linear.weight;
  if (plan.dgrad == DgradSource::kRebuild) {
    ROWSHARD_CHECK(!ctx.stream.capturing() || plan.release, UsageError, weight.name,
                   ": a graph being recorded cannot make a columnwise copy that stays: a later "
                   "backward would take it for there while no replay has run. Run one backward "
                   "before the capture, or use the policy `release`");
  } else if (plan.dgrad == DgradSource::kPlain && weight.quantized() && !weight.plain.data) {
    static_cast<void>(weight.quantized()->rowwise());
  }
}

/// x in the forms that this backward reads.
void check_input(const ConstView& dy, const LinearInput* input, const Linear& linear,
                 const LinearPlan& plan) {
  const LinearWeight& weight = *linear.weight;
  if (dy.dim(0) == 0)
    return;
  const auto has = [&](Usage wanted) {
    const Usage have = input ? input->x8.usage() : Usage{};
    return (!wanted.rowwise || have.rowwise) && (!wanted.columnwise || have.columnwise);
  };
  const bool x = input && input->x.data && input->x.dim(0) == dy.dim(0);
  ROWSHARD_CHECK(!linear.lora || x, LogicError, "linear_backward: ", weight.name,
                 " has an adapter, but its x is gone or of other rows (dy ", describe(dy),
                 "). One backward follows each forward");
  const Usage wanted_x8{plan.saves_x8.rowwise || plan.x8_again.rowwise,
                        plan.saves_x8.columnwise || plan.x8_again.columnwise};
  const bool wants_x = weight.trainable() && wanted_x8 == Usage{};
  ROWSHARD_CHECK(
      has(wanted_x8) && (!wants_x || x), LogicError, "linear_backward: ", weight.name,
      " is trainable in this backward but was frozen in its forward, which kept no x for "
      "a weight gradient (dy ",
      describe(dy), "). Set LinearWeight::gradient before the forward, or clear it");
}

}  // namespace

LinearPlan plan_of(const Linear& linear, bool backward, bool dgrad, bool input_again,
                   Context& ctx) {
  const LinearWeight& weight = *linear.weight;
  LinearFacts facts;
  if (const Fp8Matrix* fp8 = weight.quantized()) {
    facts.fp8 = true;
    facts.rebuildable = rebuildable(fp8->grouping()) && fp8->usage().rowwise;
    facts.direct = fp8->grouping() == Grouping::k128x128 && fp8->usage().rowwise;
    facts.has_columnwise = fp8->usage().columnwise;
    facts.pinned = fp8->columnwise_pinned();
  }
  facts.backward = backward;
  facts.dgrad = dgrad;
  facts.wgrad = weight.trainable();
  facts.adapter = linear.lora != nullptr;
  facts.input_again = input_again;
  facts.capturing = ctx.stream.capturing();
  facts.backward_override = linear.backward_override;
  facts.policy =
      facts.fp8 && !facts.wgrad ? columnwise_policy(linear.columnwise) : linear.columnwise;
  return plan_linear(facts);
}

void check_forward(const ConstView& y, const ConstView& x, const Linear& linear, Context& ctx) {
  check_linear("linear_forward", linear, y, x, ctx);
}

void check_backward(const View& dx, const ConstView& dy, const LinearSaved& saved,
                    const Linear& linear, const LinearPlan& plan, Context& ctx) {
  const LinearWeight& weight = *linear.weight;
  const bool fits = dy.shape.rank() == 2 && dy.dim(1) == weight.n && is_float_dtype(dy.dtype);
  ROWSHARD_CHECK(fits, ShapeError, "linear_backward: ", weight.name, " [", weight.n, ", ", weight.k,
                 "] takes dy [T, N]; got ", describe(dy));
  const ConstView same_input(nullptr, dy.dtype, {dy.dim(0), weight.k}, dy.device);
  check_linear("linear_backward", linear, dy, dx.data ? ConstView(dx) : same_input, ctx);
  if (dy.dim(0) == 0)
    return;
  check_plan(linear, plan, ctx);
  ROWSHARD_CHECK(!linear.lora || saved.lora.xa, LogicError, "linear_backward: ", weight.name,
                 " has an adapter but nothing was saved for it; give linear_forward a LinearSaved "
                 "and the adapter");
}

void check_linear_backward(const View& dx, const ConstView& dy, const LinearSaved& saved,
                           const Linear& linear, Context& ctx) {
  ROWSHARD_CHECK(linear.weight, LogicError, "linear_backward: a layer without a weight");
  const LinearPlan plan = plan_of(linear, true, dx.data != nullptr, false, ctx);
  check_backward(dx, dy, saved, linear, plan, ctx);
  check_input(dy, saved.input.get(), linear, plan);
}

std::optional<Grouping> activation_grouping(std::initializer_list<const Linear*> readers) {
  const LinearWeight* first = nullptr;
  for (const Linear* reader : readers) {
    if (!reader->weight->quantized())
      continue;
    if (!first)
      first = reader->weight;
    ROWSHARD_CHECK(
        grouping_beside(*reader->weight->quantized()) == grouping_beside(*first->quantized()),
        ConfigError, first->name, " and ", reader->weight->name,
        " read the same input but one is MX and the other is not");
  }
  return first ? std::optional(grouping_beside(*first->quantized())) : std::nullopt;
}

void project_forward(const View& y, const LinearInput& input, const Linear& linear,
                     LinearSaved* saved, Context& ctx) {
  check_linear("linear_forward", linear, y, input.x, ctx);
  const LinearWeight& weight = *linear.weight;
  if (saved)
    *saved = {};
  if (y.dim(0) == 0)
    return;
  // A trainable weight's copies are quantised together; a frozen one's columnwise copy is made at
  // dgrad, if there is one.
  refresh_workspace(weight, {true, saved && weight.trainable()}, ctx);
  base_forward(y, input, weight, ctx);
  if (linear.lora)
    lora_forward(y, input.x, *linear.lora, linear.dropout, saved ? &saved->lora : nullptr, ctx);
}

void linear_forward(const View& y, const ConstView& x, const Linear& linear, LinearSaved* saved,
                    Context& ctx) {
  check_linear("linear_forward", linear, y, x, ctx);
  const LinearPlan plan = plan_of(linear, saved != nullptr, true, false, ctx);
  auto input = std::make_shared<LinearInput>();
  input->x = x;
  input->x8.grouping = activation_grouping({&linear}).value_or(Grouping::k1x128);
  quantize_activation(input->x8, x, plan.x8, Category::kActivations, "linear.x8", ctx);
  project_forward(y, *input, linear, saved, ctx);
  if (!saved || x.dim(0) == 0)
    return;
  if (!plan.saves_x8.rowwise)
    input->x8.drop_rowwise();
  if (!plan.saves_x)
    input->x.data = nullptr;
  if (plan.saves_x || !(plan.saves_x8 == Usage{}))
    saved->input = std::move(input);
}

void project_backward(const View& dx, const ConstView& dy,
                      const std::shared_ptr<LinearInput>& input, LinearSaved& saved,
                      const Linear& linear, const LinearPlan& plan, bool accumulate_dx,
                      Context& ctx) {
  check_backward(dx, dy, saved, linear, plan, ctx);
  check_input(dy, input.get(), linear, plan);
  const LinearWeight& weight = *linear.weight;
  if (weight.bias_gradient.data)
    add_column_sums(weight.bias_gradient, dy, ctx);
  if (dy.dim(0) == 0) {
    if (weight.trainable() && !weight.accumulate_gradient)
      fill_bytes(weight.gradient, 0, ctx.stream);
    release_columnwise(linear, plan, ctx);
    return;
  }
  QuantizedActivation dy8;
  if (weight.quantized())
    dy8.grouping = grouping_beside(*weight.quantized());
  quantize_activation(dy8, dy, plan.dy8, Category::kWorkspace, "linear.dy8", ctx);
  // The copy is released before everything that does not read it.
  base_backward(dx, dy, dy8, linear, plan, accumulate_dx ? 1 : 0, ctx);
  release_columnwise(linear, plan, ctx);
  dy8.drop_rowwise();
  if (linear.lora)
    lora_backward(dx, dy, input->x, *linear.lora, saved.lora, ctx);
  if (!weight.trainable())
    return;
  if (linear.delay_weight_gradient) {
    saved.input = input;
    saved.delayed = {dy, std::move(dy8), true};
  } else {
    weight_gradient(dy, dy8, *input, linear, ctx);
  }
}

void linear_backward(const View& dx, const ConstView& dy, LinearSaved& saved, const Linear& linear,
                     bool accumulate_dx, Context& ctx) {
  ROWSHARD_CHECK(linear.weight, LogicError, "linear_backward: a layer without a weight");
  const LinearPlan plan = plan_of(linear, true, dx.data != nullptr, false, ctx);
  project_backward(dx, dy, saved.input, saved, linear, plan, accumulate_dx, ctx);
  if (!saved.delayed.waiting)
    saved.input.reset();
}

void linear_weight_gradient(LinearSaved& saved, const Linear& linear, Context& ctx) {
  ROWSHARD_CHECK(linear.weight, LogicError, "linear_weight_gradient: a layer without a weight");
  const LinearWeight& weight = *linear.weight;
  ROWSHARD_CHECK(weight.trainable(), LogicError, "linear_weight_gradient: ", weight.name, " [",
                 weight.n, ", ", weight.k,
                 "] is frozen: it has nowhere to put a gradient. Set LinearWeight::gradient before "
                 "the forward");
  ROWSHARD_CHECK(saved.delayed.waiting, LogicError, "linear_weight_gradient: no gradient of ",
                 weight.name,
                 " is waiting. Run the backward with delay_weight_gradient first, and call this "
                 "once");
  check_weight("linear_weight_gradient", weight);
  weight_gradient(saved.delayed.dy, saved.delayed.dy8, *saved.input, linear, ctx);
  saved.delayed = {};
  saved.input.reset();
}

}  // namespace rowshard
