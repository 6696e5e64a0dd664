#include "layers/linear.h"

#include "core/matmul.h"
#include "core/trace.h"
#include "fp8/gemm.h"
#include "fp8/quantize.h"
#include "layers/dispatch.h"
#include "layers/elementwise.h"

namespace rowshard {

const char* to_string(ColumnwisePolicy policy) {
  switch (policy) {
    case ColumnwisePolicy::kRelease:
      return "release";
    case ColumnwisePolicy::kResident:
      return "resident";
    case ColumnwisePolicy::kDirect:
      return "direct";
  }
  return "?";
}

namespace {

/// Activations of an MX weight are MX too; all others are 1×128.
Grouping activation_grouping(const Fp8Matrix& weight) {
  return is_mx(weight.grouping()) ? Grouping::kMx1x32 : Grouping::k1x128;
}

QuantizedInput quantize_rowwise(const ConstView& x, Grouping grouping, Category category,
                                const char* name, Context& ctx) {
  QuantizedInput result;
  result.grouping = grouping;
  result.codes = ctx.arena.tensor(category, name, DType::kE4M3, x.shape);
  result.scales = ctx.arena.tensor(category, name, scale_dtype(grouping),
                                   gemm_scale_shape(grouping, x.dim(0), x.dim(1)));
  const Fp8View view{result.codes, result.scales, grouping};
  quantize(&view, nullptr, x, {}, ctx.stream);
  return result;
}

/// A plain weight in the dtype of x: itself, or converted into scratch.
struct PlainWeight {
  Tensor scratch;
  ConstView view;

  PlainWeight(const LinearWeight& weight, DType dtype, Context& ctx) : view(weight.plain) {
    if (weight.plain.dtype == dtype)
      return;
    scratch = ctx.arena.tensor(Category::kWorkspace, "linear.converted", dtype, view.shape);
    convert(scratch, view, ctx.stream);
    view = scratch;
  }
};

void check_linear(const char* operation, const LinearWeight& weight, const ConstView& y,
                  const ConstView& x) {
  const bool weight_fits =
      weight.fp8 ? weight.fp8->rows() == weight.n && weight.fp8->cols() == weight.k
                 : weight.plain.data != nullptr && weight.plain.shape == Shape{weight.n, weight.k};
  ROWSHARD_CHECK(weight_fits, ShapeError, operation, ": ", weight.name, " is declared [", weight.n,
                 ", ", weight.k, "] but holds ",
                 weight.fp8 ? message("fp8 [", weight.fp8->rows(), ", ", weight.fp8->cols(), "]")
                            : describe(weight.plain));
  const bool fit = x.shape.rank() == 2 && y.shape.rank() == 2 && x.dim(0) == y.dim(0) &&
                   x.dim(1) == weight.k && y.dim(1) == weight.n && x.dtype == y.dtype &&
                   is_float_dtype(x.dtype) && !(weight.fp8 && x.dtype == DType::kF64);
  ROWSHARD_CHECK(fit, ShapeError, operation, ": ", weight.name, " [", weight.n, ", ", weight.k,
                 weight.fp8 ? "] fp8" : "] plain",
                 " takes x [T, K] and y [T, N] of one dtype; got x ", describe(x), ", y ",
                 describe(y));
}

void base_forward(const View& y, const ConstView& x, const QuantizedInput& x8,
                  const LinearWeight& weight, Context& ctx) {
  const TraceSpan span(ctx.stream, TraceLane::kCompute,
                       Trace::active() ? weight.name + " fprop" : std::string());
  const bool biased = weight.bias.data != nullptr;
  if (weight.fp8) {
    ROWSHARD_CHECK(
        x8 && x8.codes.shape() == x.shape && x8.grouping == activation_grouping(*weight.fp8),
        LogicError, "linear_forward: ", weight.name,
        " is FP8 and needs quantize_input of this x; got ", x8 ? describe(x8.view()) : "none",
        " for x ", describe(x));
    GemmOptions options;
    if (biased)
      options.bias = weight.bias;
    fp8_gemm(y, x8.view(), weight.fp8->rowwise(), options, ctx);
    return;
  }
  const PlainWeight plain(weight, x.dtype, ctx);
  if (biased)
    broadcast_row(y, weight.bias, ctx.stream);
  matmul(y, x, Transpose::kNo, plain.view, Transpose::kYes, 1, biased ? 1 : 0, ctx);
}

void base_backward(const View& dx, const ConstView& dy, const LinearWeight& weight, float beta,
                   ColumnwisePolicy policy, Context& ctx) {
  const TraceSpan span(ctx.stream, TraceLane::kCompute,
                       Trace::active() ? weight.name + " dgrad" : std::string());
  if (!weight.fp8) {
    const PlainWeight plain(weight, dy.dtype, ctx);
    matmul(dx, dy, Transpose::kNo, plain.view, Transpose::kNo, 1, beta, ctx);
    return;
  }
  ROWSHARD_CHECK(policy != ColumnwisePolicy::kDirect, ConfigError,
                 "columnwise policy `direct` is not in this build yet (", weight.name,
                 "); use `release` or `resident`");
  Fp8Matrix& matrix = *weight.fp8;
  const QuantizedInput dy8 =
      quantize_rowwise(dy, activation_grouping(matrix), Category::kWorkspace, "linear.dy8", ctx);
  matrix.update_usage(std::nullopt, true, ctx);
  fp8_gemm(dx, dy8.view(), matrix.columnwise(), {.beta = beta, .bias = std::nullopt}, ctx);
  if (policy == ColumnwisePolicy::kRelease && rebuildable(matrix.grouping())) {
    matrix.update_usage(std::nullopt, false, ctx);
  }
}

}  // namespace

QuantizedInput quantize_input(const ConstView& x,
                              std::initializer_list<const LinearWeight*> readers, Context& ctx) {
  const LinearWeight* first = nullptr;
  for (const LinearWeight* reader : readers) {
    if (!reader->fp8)
      continue;
    if (!first)
      first = reader;
    ROWSHARD_CHECK(activation_grouping(*reader->fp8) == activation_grouping(*first->fp8),
                   ConfigError, first->name, " and ", reader->name,
                   " read the same input but one is MX and the other is not");
  }
  if (!first)
    return {};
  return quantize_rowwise(x, activation_grouping(*first->fp8), Category::kActivations, "linear.x8",
                          ctx);
}

void linear_forward(const View& y, const ConstView& x, const QuantizedInput& x8,
                    const LinearWeight& weight, const LoraFactors* lora, const Dropout& dropout,
                    LinearSaved* saved, Context& ctx) {
  check_linear("linear_forward", weight, y, x);
  if (saved)
    *saved = {};
  if (x.dim(0) == 0)
    return;
  base_forward(y, x, x8, weight, ctx);
  if (!lora)
    return;
  if (saved)
    saved->x = x;
  lora_forward(y, x, *lora, dropout, saved ? &saved->lora : nullptr, ctx);
}

void linear_backward(const View& dx, const ConstView& dy, const LinearSaved& saved,
                     const LinearWeight& weight, const LoraFactors* lora, bool accumulate_dx,
                     ColumnwisePolicy policy, Context& ctx) {
  const bool wanted = dx.data != nullptr;
  if (wanted)
    check_linear("linear_backward", weight, dy, dx);
  if (dy.dim(0) == 0)
    return;
  // The copy is released before the adapter's products, which do not read it.
  if (wanted)
    base_backward(dx, dy, weight, accumulate_dx ? 1 : 0, policy, ctx);
  if (!lora)
    return;
  ROWSHARD_CHECK(saved.x.data != nullptr, LogicError, "linear_backward: ", weight.name,
                 " has an adapter but nothing was saved; give linear_forward a LinearSaved");
  lora_backward(dx, dy, saved.x, *lora, saved.lora, ctx);
}

}  // namespace rowshard
