#include "core/matmul.h"
#include "layers/dispatch.h"
#include "layers/elementwise.h"
#include "layers/lora.h"
#include "layers/mask_runs.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void apply_dropout(const View& y, const ConstView& x, const Dropout& dropout, Stream& stream);
}
#endif

namespace host {

void apply_dropout(const View& y, const ConstView& x, const Dropout& dropout, Stream&) {
  for_host_type(x.dtype, "apply_dropout", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    T* out = y.as<T>();
    const T* in = x.as<T>();
    const MaskRuns runs(x, dropout);
    const A keep = 1 / (1 - static_cast<A>(dropout.rate));
    const Philox random = dropout.philox();
    // One call of the generator gives four neighbouring elements.
#pragma omp parallel for if (x.elements() > kParallelElements)
    for (int64_t item = 0; item < runs.count * runs.groups; ++item) {
      const int64_t run = item / runs.groups;
      const int64_t first = runs.first + run * runs.stride;
      const int64_t group = first / 4 + item % runs.groups;
      const auto words = random.words(group);
      for (int64_t lane = 0; lane < 4; ++lane) {
        const int64_t i = group * 4 + lane - first;
        if (i < 0 || i >= runs.length)
          continue;
        const float uniform = static_cast<float>(words[lane] >> 8) * 0x1p-24f;
        const int64_t at = run * runs.length + i;
        out[at] = uniform < dropout.rate ? T{} : narrow<T>(widen(in[at]) * keep);
      }
    }
  });
}

}  // namespace host

void apply_dropout(const View& y, const ConstView& x, const Dropout& dropout, Stream& stream) {
  check_operands(same_operands(x, {y}) && x.shape.rank() == 2, "apply_dropout", "y and x [T, K]",
                 {{"y", y}, {"x", x}});
  ROWSHARD_CHECK(dropout.rate >= 0 && dropout.rate < 1, ConfigError,
                 "the dropout rate must be in [0, 1); got ", dropout.rate);
  ROWSHARD_CHECK(dropout.columns == 0 || dropout.first_column + x.dim(1) <= dropout.columns,
                 ShapeError, "apply_dropout: columns ", dropout.first_column, " on of ",
                 dropout.columns, " for x ", describe(x));
  if (x.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, apply_dropout(y, x, dropout, stream));
}

namespace {

/// x with the mask on it: x itself at rate 0, else a copy in workspace that lives as long as this.
struct DroppedInput {
  Tensor scratch;
  ConstView view;

  DroppedInput(const ConstView& x, const Dropout& dropout, Context& ctx) : view(x) {
    if (dropout.rate == 0)
      return;
    scratch = ctx.arena.tensor(Category::kWorkspace, "lora.dropped", x.dtype, x.shape);
    apply_dropout(scratch, x, dropout, ctx.stream);
    view = scratch;
  }
};

void check_factors(const char* operation, const ConstView& y, const ConstView& x,
                   const LoraFactors& factors) {
  const ConstView& a = factors.a;
  const ConstView& b = factors.b;
  check_operands(x.shape.rank() == 2 && y.shape.rank() == 2 && a.shape.rank() == 2 &&
                     b.shape.rank() == 2 && x.dim(0) == y.dim(0) && a.dim(1) == x.dim(1) &&
                     b.dim(0) == y.dim(1) && a.dim(0) == b.dim(1) && a.dim(0) > 0,
                 operation, "y [T, N], x [T, K], A [r, K], B [N, r]",
                 {{"y", y}, {"x", x}, {"A", a}, {"B", b}});
}

}  // namespace

void lora_down(const View& xa, const ConstView& x, const LoraFactors& factors,
               const Dropout& dropout, Context& ctx) {
  const DroppedInput input(x, dropout, ctx);
  matmul(xa, input.view, Transpose::kNo, factors.a, Transpose::kYes, 1, 0, ctx);
}

void lora_up(const View& y, const ConstView& xa, const LoraFactors& factors, Context& ctx) {
  matmul(y, xa, Transpose::kNo, factors.b, Transpose::kYes, factors.scale, 1, ctx);
}

void lora_up_gradient(const ConstView& dy, const ConstView& xa, const LoraFactors& factors,
                      Context& ctx) {
  matmul(factors.grad_b, dy, Transpose::kYes, xa, Transpose::kNo, factors.scale, 1, ctx);
}

void lora_up_backward(const View& dxa, const ConstView& dy, const LoraFactors& factors,
                      Context& ctx) {
  matmul(dxa, dy, Transpose::kNo, factors.b, Transpose::kNo, factors.scale, 0, ctx);
}

void lora_down_backward(const View& dx, const ConstView& dxa, const ConstView& x,
                        const LoraFactors& factors, const Dropout& dropout, Context& ctx) {
  {
    const DroppedInput input(x, dropout, ctx);
    matmul(factors.grad_a, dxa, Transpose::kYes, input.view, Transpose::kNo, 1, 1, ctx);
  }
  if (dx.data == nullptr)
    return;
  if (dropout.rate == 0) {
    matmul(dx, dxa, Transpose::kNo, factors.a, Transpose::kNo, 1, 1, ctx);
    return;
  }
  Tensor branch = ctx.arena.tensor(Category::kWorkspace, "lora.branch", dx.dtype, dx.shape);
  matmul(branch, dxa, Transpose::kNo, factors.a, Transpose::kNo, 1, 0, ctx);
  apply_dropout(branch, branch, dropout, ctx.stream);
  add(dx, dx, branch, ctx.stream);
}

void lora_forward(const View& y, const ConstView& x, const LoraFactors& factors,
                  const Dropout& dropout, LoraSaved* saved, Context& ctx) {
  check_factors("lora_forward", y, x, factors);
  Tensor xa = ctx.arena.tensor(saved ? Category::kActivations : Category::kWorkspace, "lora.xa",
                               x.dtype, {x.dim(0), factors.rank()});
  lora_down(xa, x, factors, dropout, ctx);
  lora_up(y, xa, factors, ctx);
  if (saved)
    *saved = LoraSaved{std::move(xa), dropout};
}

void lora_backward(const View& dx, const ConstView& dy, const ConstView& x,
                   const LoraFactors& factors, const LoraSaved& saved, Context& ctx) {
  check_factors("lora_backward", dy, x, factors);
  check_operands(dx.data == nullptr || dx.shape == x.shape, "lora_backward", "dx like x",
                 {{"dx", dx}, {"x", x}});
  ROWSHARD_CHECK(saved.xa && saved.xa.shape() == (Shape{x.dim(0), factors.rank()}), LogicError,
                 "lora_backward without the forward of these rows: saved xa ",
                 describe(saved.xa.view()), ", x ", describe(x), ", rank ", factors.rank());
  lora_up_gradient(dy, saved.xa, factors, ctx);
  Tensor dxa = ctx.arena.tensor(Category::kWorkspace, "lora.dxa", x.dtype, saved.xa.shape());
  lora_up_backward(dxa, dy, factors, ctx);
  lora_down_backward(dx, dxa, x, factors, saved.dropout, ctx);
}

}  // namespace rowshard
