#include "layers/parallel_linear.h"

#include "core/matmul.h"
#include "fp8/dgrad_rowwise.h"
#include "fp8/gemm.h"
#include "fp8/quantize.h"
#include "layers/dispatch.h"
#include "layers/dropped_input.h"
#include "layers/elementwise.h"

namespace rowshard {

namespace {

QuantizedActivation empty_panel(int64_t rows, int64_t cols, Category category, Context& ctx) {
  return allocate_rowwise({rows, cols}, Grouping::k1x128, category, "tp.rows8", ctx);
}

void quantize_into(const QuantizedActivation& panel, const ConstView& x, Context& ctx) {
  const Fp8View view = panel.rowwise();
  quantize(&view, nullptr, x, {}, ctx.stream);
}

/// A run of rows as a product reads them.
struct Rows {
  ConstFp8View fp8;  // when the weight is
  ConstView plain;
};

/// Some rows of a tensor of this rank, quantised for a product if need be.
struct OwnRows {
  QuantizedActivation panel;
  Rows rows;

  OwnRows(const ConstView& x, bool fp8, Context& ctx) {
    rows.plain = x;
    if (!fp8)
      return;
    panel = empty_panel(x.dim(0), x.dim(1), Category::kWorkspace, ctx);
    quantize_into(panel, x, ctx);
    rows.fp8 = panel.rowwise();
  }
};

/// A tensor of the residual stream as products over all tokens read it, step by step: with sequence
/// parallelism the ranks' tokens as they arrive, without it everything in one step.
class GatheredRows {
 public:
  GatheredRows(const ConstView& own, int64_t tokens, bool fp8, TensorParallel& tp, Context& ctx)
      : tp_(tp), ctx_(ctx), own_(own), fp8_(fp8) {
    const int64_t cols = own.dim(1);
    const int count = steps();
    if (fp8) {
      for (int rank = 0; rank < count; ++rank)
        panels_.push_back(empty_panel(tokens / count, cols, Category::kCommunication, ctx));
      quantize_into(panels_[tp.sequence ? tp.rank() : 0], own, ctx);
    } else if (tp.sequence) {
      plain_ = ctx.arena.tensor(Category::kCommunication, "tp.tokens", own.dtype, {tokens, cols});
      copy(tp.part(plain_.view(), tp.rank()), own, ctx.stream);
    }
    if (!tp.sequence)
      return;
    RankParts parts(count);
    for (int rank = 0; rank < count; ++rank) {
      if (fp8) {
        parts[rank] = {panels_[rank].codes, panels_[rank].scales};
      } else {
        parts[rank] = {tp.part(plain_.view(), rank)};
      }
    }
    gather_.emplace(tp, std::move(parts), ctx);
  }

  int steps() const { return tp_.sequence ? tp_.size() : 1; }
  /// The rows of a tensor of all tokens that step i is about.
  template <typename V>
  V part(const V& whole, int step) const {
    return gather_ ? tp_.part(whole, gather_->rank_at(step)) : whole;
  }
  Rows wait(int step) {
    if (gather_)
      gather_->wait(step);
    const int rank = gather_ ? gather_->rank_at(step) : 0;
    Rows rows;
    if (fp8_) {
      rows.fp8 = panels_[rank].rowwise();
    } else {
      rows.plain = gather_ ? tp_.part(ConstView(plain_), rank) : own_;
    }
    return rows;
  }

 private:
  TensorParallel& tp_;
  Context& ctx_;
  ConstView own_;
  bool fp8_;
  std::vector<QuantizedActivation> panels_;  // by rank
  Tensor plain_;                             // [T, K]
  std::optional<TokenGather> gather_;
};

/// A frozen layer while its products of several steps run.
class Operand {
 public:
  Operand(const Linear& linear, DType dtype, Context& ctx)
      : weight_(*linear.weight), fp8_(weight_.quantized()), asked_(linear.columnwise), ctx_(ctx) {
    ROWSHARD_CHECK(!weight_.trainable(), LogicError, weight_.name,
                   ": tensor-parallel layers are frozen; train an adapter");
    ROWSHARD_CHECK(!fp8_ || fp8_->grouping() == Grouping::k128x128, ConfigError, weight_.name,
                   ": tensor parallelism is for 128x128 blocks and plain weights, not ",
                   to_string(fp8_->grouping()));
    plain_ = weight_.plain;
    if (!fp8_ && plain_.dtype != dtype) {
      converted_ = ctx.arena.tensor(Category::kWorkspace, "linear.converted", dtype, plain_.shape);
      convert(converted_, plain_, ctx.stream);
      plain_ = converted_;
    }
  }

  void forward(const View& y, const Rows& x, bool with_bias) const {
    const ConstView bias = with_bias ? weight_.bias : ConstView();
    const bool fused = bias.data && fp8_ && (!on_cuda() || bias.dtype == DType::kBF16);
    if (bias.data && !fused)
      broadcast_row(y, bias, ctx_.stream);
    const float beta = bias.data && !fused ? 1 : 0;
    if (fp8_) {
      GemmOptions options;
      options.beta = beta;
      if (fused)
        options.bias = bias;
      fp8_gemm(y, x.fp8, fp8_->rowwise(), options, ctx_);
      return;
    }
    matmul(y, x.plain, Transpose::kNo, plain_, Transpose::kYes, 1, beta, ctx_);
  }

  /// Before the first dgrad; `release` after the last.
  void prepare_dgrad(int64_t rows) {
    if (!fp8_)
      return;
    policy_ = columnwise_policy(asked_);
    // As in one rank's plan, by the rows of one product; either gives the same bits.
    direct_ = !fp8_->usage().columnwise &&
              (policy_ == ColumnwisePolicy::kDirect ||
               (policy_ == ColumnwisePolicy::kAuto && rows <= kDirectTokens));
    if (!direct_)
      fp8_->update_usage(std::nullopt, true, ctx_);
  }
  /// dx [rows, K] = dy [rows, N] · W + beta · dx
  void dgrad(const View& dx, const Rows& dy, float beta) const {
    if (fp8_ && direct_) {
      fp8_dgrad_rowwise(dx, dy.fp8, fp8_->rowwise(), beta, ctx_);
      return;
    }
    if (fp8_) {
      fp8_gemm(dx, dy.fp8, fp8_->columnwise(), {.beta = beta, .bias = std::nullopt}, ctx_);
      return;
    }
    matmul(dx, dy.plain, Transpose::kNo, plain_, Transpose::kNo, 1, beta, ctx_);
  }
  void release() {
    if (fp8_ && !direct_ && policy_ != ColumnwisePolicy::kResident)
      fp8_->update_usage(std::nullopt, false, ctx_);
  }

 private:
  bool on_cuda() const {
    return ctx_.device().is_cuda() || (ctx_.device().is_plan() && ctx_.device().index > 0);
  }

  const LinearWeight& weight_;
  Fp8Matrix* fp8_;
  ColumnwisePolicy asked_, policy_ = ColumnwisePolicy::kRelease;
  bool direct_ = false;
  Context& ctx_;
  Tensor converted_;
  ConstView plain_;
};

// -- an adapter's products

void down(const View& xa, const ConstView& x, const LoraFactors& lora, const Dropout& dropout,
          Context& ctx) {
  const DroppedInput masked(x, dropout, ctx);
  matmul(xa, masked.view, Transpose::kNo, lora.a, Transpose::kYes, 1, 0, ctx);
}

void up(const View& y, const ConstView& xa, const LoraFactors& lora, Context& ctx) {
  matmul(y, xa, Transpose::kNo, lora.b, Transpose::kYes, lora.scale, 1, ctx);
}

void up_backward(const View& dxa, const ConstView& dy, const LoraFactors& lora, Context& ctx) {
  matmul(dxa, dy, Transpose::kNo, lora.b, Transpose::kNo, lora.scale, 0, ctx);
}

/// dA and the adapter's part of dx (no data: not wanted).
void down_backward(const View& dx, const ConstView& dxa, const ConstView& x,
                   const LoraFactors& lora, const Dropout& dropout, Context& ctx) {
  {
    const DroppedInput masked(x, dropout, ctx);
    matmul(lora.grad_a, dxa, Transpose::kYes, masked.view, Transpose::kNo, 1, 1, ctx);
  }
  if (!dx.data)
    return;
  if (dropout.rate == 0) {
    matmul(dx, dxa, Transpose::kNo, lora.a, Transpose::kNo, 1, 1, ctx);
    return;
  }
  Tensor branch = ctx.arena.tensor(Category::kWorkspace, "lora.branch", dx.dtype, dx.shape);
  matmul(branch, dxa, Transpose::kNo, lora.a, Transpose::kNo, 1, 0, ctx);
  apply_dropout(branch, branch, dropout, ctx.stream);
  add(dx, dx, branch, ctx.stream);
}

void up_gradient(const ConstView& dy, const ConstView& xa, const LoraFactors& lora, Context& ctx) {
  matmul(lora.grad_b, dy, Transpose::kYes, xa, Transpose::kNo, lora.scale, 1, ctx);
}

// -- checks and pieces of both kinds

void check_layer(const char* operation, const LinearWeight& weight, const ConstView& y,
                 const ConstView& x, int64_t y_rows, int64_t x_rows) {
  check_weight(operation, weight);
  const bool fp8 = weight.quantized() != nullptr;
  const bool fit = x.shape == Shape{x_rows, weight.k} && y.shape == Shape{y_rows, weight.n} &&
                   x.dtype == y.dtype && is_float_dtype(x.dtype) &&
                   !(fp8 && x.dtype == DType::kF64);
  ROWSHARD_CHECK(fit, ShapeError, operation, ": ", weight.name, " [", weight.n, ", ", weight.k,
                 fp8 ? "] fp8" : "] plain", " takes x [", x_rows, ", K] and y [", y_rows,
                 ", N] of one dtype; got x ", describe(x), ", y ", describe(y));
}

bool one_kind(std::span<const Linear> layers) {
  const bool fp8 = layers[0].weight->quantized() != nullptr;
  for (const Linear& layer : layers) {
    ROWSHARD_CHECK((layer.weight->quantized() != nullptr) == fp8, ConfigError,
                   layers[0].weight->name, " and ", layer.weight->name,
                   " read one input; both are FP8 or neither");
  }
  return fp8;
}

Tensor small(const char* name, Category category, DType dtype, int64_t rows, int64_t cols,
             Context& ctx) {
  return ctx.arena.tensor(category, name, dtype, {rows, cols});
}

DType partial_dtype(DType dtype, const TensorParallel& tp) {
  return tp.wide_sums && dtype == DType::kBF16 ? DType::kF32 : dtype;
}

/// The mask of a rank's own tokens.
Dropout at_own_tokens(Dropout dropout, int64_t tokens, const TensorParallel& tp) {
  if (tp.sequence)
    dropout.first_token += tp.rank() * tp.share(tokens);
  return dropout;
}

/// Every rank's part of each tensor of all tokens.
RankParts parts_of(std::span<const View> wholes, const TensorParallel& tp) {
  RankParts parts(tp.size());
  for (int rank = 0; rank < tp.size(); ++rank) {
    for (const View& whole : wholes)
      parts[rank].push_back(tp.part(whole, rank));
  }
  return parts;
}

/// Where a sum of this rank's tokens goes in a tensor of the residual stream.
View own_rows(const View& residual, const TensorParallel& tp) {
  return tp.sequence ? residual : tp.part(residual, tp.rank());
}

/// Without sequence parallelism every rank needs every rank's sums.
void share_sums(std::span<const View> residuals, TensorParallel& tp, Context& ctx) {
  if (!tp.sequence && tp.size() > 1)
    TokenGather(tp, parts_of(residuals, tp), ctx).wait_all();
}

}  // namespace

void column_parallel_forward(std::span<const View> ys, const ConstView& x,
                             std::span<const Linear> layers, ParallelSaved* saved,
                             TensorParallel& tp, Context& ctx) {
  const int64_t tokens = ys[0].dim(0);
  for (size_t i = 0; i < layers.size(); ++i) {
    check_layer("column_parallel_forward", *layers[i].weight, ys[i], x, tokens,
                tp.residual_rows(tokens));
  }
  GatheredRows input(x, tokens, one_kind(layers), tp, ctx);

  // While x travels, its adapters' small products; they travel behind it.
  std::vector<Tensor> xa(layers.size());
  std::vector<View> wholes;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].lora)
      continue;
    xa[i] = small("tp.xa", saved ? Category::kActivations : Category::kWorkspace, x.dtype, tokens,
                  layers[i].lora->rank(), ctx);
    down(tp.sequence ? tp.part(xa[i].view(), tp.rank()) : xa[i].view(), x, *layers[i].lora,
         at_own_tokens(layers[i].dropout, tokens, tp), ctx);
    wholes.push_back(xa[i]);
  }
  std::optional<TokenGather> small_gather;
  if (tp.sequence && !wholes.empty())
    small_gather.emplace(tp, parts_of(wholes, tp), ctx);

  std::vector<Operand> operands;
  for (const Linear& layer : layers)
    operands.emplace_back(layer, x.dtype, ctx);
  for (int step = 0; step < input.steps(); ++step) {
    const Rows rows = input.wait(step);
    for (size_t i = 0; i < layers.size(); ++i)
      operands[i].forward(input.part(ys[i], step), rows, true);
  }
  if (small_gather)
    small_gather->wait_all();
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].lora)
      up(ys[i], xa[i], *layers[i].lora, ctx);
  }
  if (saved)
    saved->xa = std::move(xa);
}

void column_parallel_backward(const View& dx, std::span<const ConstView> dys, const ConstView& x,
                              std::span<const Linear> layers, const ParallelSaved& saved,
                              TensorParallel& tp, Context& ctx) {
  const int64_t tokens = dys[0].dim(0);
  const DType dtype = dys[0].dtype;
  const bool wanted = dx.data != nullptr;
  const bool fp8 = one_kind(layers);
  std::vector<View> partials;  // of all tokens, by this rank's features
  std::vector<View> sums;      // of the residual stream, complete
  Tensor dx_partial;
  if (wanted) {
    for (size_t i = 0; i < layers.size(); ++i) {
      check_layer("column_parallel_backward", *layers[i].weight, dys[i], dx, tokens,
                  tp.residual_rows(tokens));
    }
    dx_partial = ctx.arena.tensor(Category::kCommunication, "tp.partial", partial_dtype(dtype, tp),
                                  {tokens, dx.dim(1)});
    partials.push_back(dx_partial);
    sums.push_back(dx);
  }
  std::vector<Tensor> dxa_partial(layers.size()), dxa(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const LoraFactors* lora = layers[i].lora;
    if (!lora)
      continue;
    ROWSHARD_CHECK(
        i < saved.xa.size() && saved.xa[i] && saved.xa[i].shape() == (Shape{tokens, lora->rank()}),
        LogicError, "column_parallel_backward: ", layers[i].weight->name,
        " has an adapter but nothing was saved for these tokens");
    dxa_partial[i] =
        small("tp.dxa_partial", Category::kWorkspace, dtype, tokens, lora->rank(), ctx);
    up_backward(dxa_partial[i], dys[i], *lora, ctx);
    dxa[i] =
        small("tp.dxa", Category::kWorkspace, dtype, tp.residual_rows(tokens), lora->rank(), ctx);
    partials.push_back(dxa_partial[i]);
    sums.push_back(dxa[i]);
  }
  if (partials.empty())
    return;

  TokenReduce reduce(tp, parts_of(partials, tp), ctx);
  std::vector<Operand> operands;
  if (wanted) {
    for (const Linear& layer : layers) {
      operands.emplace_back(layer, dtype, ctx);
      operands.back().prepare_dgrad(tokens / tp.size());
    }
  }
  for (int step = 0; step < tp.size(); ++step) {
    const int rank = reduce.rank_at(step);
    for (size_t i = 0; i < operands.size(); ++i) {
      const OwnRows dy(tp.part(dys[i], rank), fp8, ctx);
      operands[i].dgrad(tp.part(dx_partial.view(), rank), dy.rows, i > 0 ? 1 : 0);
    }
    reduce.send(step);
  }
  for (Operand& operand : operands)
    operand.release();
  operands.clear();
  // What needs no other rank, while the sums travel.
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].lora)
      up_gradient(dys[i], saved.xa[i], *layers[i].lora, ctx);
  }
  std::vector<View> own;
  for (const View& sum : sums)
    own.push_back(own_rows(sum, tp));
  reduce.finish(own);
  share_sums(sums, tp, ctx);
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].lora) {
      down_backward(dx, dxa[i], x, *layers[i].lora, at_own_tokens(layers[i].dropout, tokens, tp),
                    ctx);
    }
  }
}

void row_parallel_forward(const View& y, const ConstView& x, const Linear& layer,
                          ParallelSaved* saved, TensorParallel& tp, Context& ctx) {
  const int64_t tokens = x.dim(0);
  const LinearWeight& weight = *layer.weight;
  check_layer("row_parallel_forward", weight, y, x, tp.residual_rows(tokens), tokens);
  const bool fp8 = weight.quantized() != nullptr;
  std::vector<View> partials, sums;
  Tensor y_partial = ctx.arena.tensor(Category::kCommunication, "tp.partial",
                                      partial_dtype(y.dtype, tp), {tokens, weight.n});
  partials.push_back(y_partial);
  sums.push_back(y);
  Tensor xa_partial, xa;
  if (layer.lora) {
    const int64_t r = layer.lora->rank();
    xa_partial = small("tp.xa_partial", Category::kWorkspace, x.dtype, tokens, r, ctx);
    down(xa_partial, x, *layer.lora, layer.dropout, ctx);
    if (saved) {  // only backward needs the sum; it travels with the product
      xa = small("tp.xa", Category::kActivations, x.dtype, tp.residual_rows(tokens), r, ctx);
      partials.push_back(xa_partial);
      sums.push_back(xa);
    }
  }
  TokenReduce reduce(tp, parts_of(partials, tp), ctx);
  const Operand operand(layer, x.dtype, ctx);
  for (int step = 0; step < tp.size(); ++step) {
    const int rank = reduce.rank_at(step);
    const OwnRows rows(tp.part(x, rank), fp8, ctx);
    const View part = tp.part(y_partial.view(), rank);
    operand.forward(part, rows.rows, false);
    if (layer.lora)
      up(part, tp.part(ConstView(xa_partial), rank), *layer.lora, ctx);
    reduce.send(step);
  }
  std::vector<View> own;
  for (const View& sum : sums)
    own.push_back(own_rows(sum, tp));
  reduce.finish(own, weight.bias);
  share_sums(sums, tp, ctx);
  if (saved) {
    saved->xa.clear();
    saved->xa.push_back(std::move(xa));
  }
}

void row_parallel_backward(const View& dx, const ConstView& dy, const ConstView& x,
                           const Linear& layer, const ParallelSaved& saved, TensorParallel& tp,
                           Context& ctx) {
  const LinearWeight& weight = *layer.weight;
  const LoraFactors* lora = layer.lora;
  const bool wanted = dx.data != nullptr;
  if (!wanted && !lora)
    return;
  const int64_t tokens = wanted ? dx.dim(0) : x.dim(0);
  if (wanted)
    check_layer("row_parallel_backward", weight, dy, dx, tp.residual_rows(tokens), tokens);
  std::optional<GatheredRows> input;
  if (wanted)
    input.emplace(dy, tokens, weight.quantized() != nullptr, tp, ctx);

  Tensor dxa;
  std::optional<TokenGather> small_gather;
  if (lora) {
    ROWSHARD_CHECK(!saved.xa.empty() && saved.xa[0] &&
                       saved.xa[0].shape() == (Shape{tp.residual_rows(tokens), lora->rank()}),
                   LogicError, "row_parallel_backward: ", weight.name,
                   " has an adapter but nothing was saved for these tokens");
    dxa = small("tp.dxa", Category::kWorkspace, dy.dtype, tokens, lora->rank(), ctx);
    up_backward(tp.sequence ? tp.part(dxa.view(), tp.rank()) : dxa.view(), dy, *lora, ctx);
    if (tp.sequence) {
      const View whole = dxa;
      small_gather.emplace(tp, parts_of({&whole, 1}, tp), ctx);
    }
    up_gradient(dy, saved.xa[0], *lora, ctx);
  }
  if (wanted) {
    Operand operand(layer, dy.dtype, ctx);
    operand.prepare_dgrad(tokens / input->steps());
    for (int step = 0; step < input->steps(); ++step) {
      const Rows rows = input->wait(step);
      operand.dgrad(input->part(dx, step), rows, 0);
    }
    operand.release();
  }
  if (small_gather)
    small_gather->wait_all();
  if (lora)
    down_backward(dx, dxa, x, *lora, layer.dropout, ctx);
}

}  // namespace rowshard
