#include "layers/parallel_linear.h"

#include "layers/dispatch.h"
#include "layers/parallel_products.h"

namespace rowshard {

namespace {

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

/// The rank of the adapters of a layer's experts; 0: it has none.
int64_t adapter_rank(std::span<const Linear> experts) {
  const int64_t rank = experts[0].lora ? experts[0].lora->rank() : 0;
  for (const Linear& expert : experts) {
    ROWSHARD_CHECK((expert.lora ? expert.lora->rank() : 0) == rank, ConfigError,
                   expert.weight->name,
                   ": experts of one layer have adapters of one rank, or none");
  }
  return rank;
}

Tensor small(const char* name, Category category, DType dtype, int64_t rows, int64_t cols,
             Context& ctx) {
  return ctx.arena.tensor(category, name, dtype, {rows, cols});
}

DType partial_dtype(DType dtype, const TensorParallel& tp) {
  return tp.wide_sums && dtype == DType::kBF16 ? DType::kF32 : dtype;
}

/// The mask of a group's rows.
Dropout mask_of(const Linear& linear, const RowGroup& group) {
  Dropout dropout = linear.dropout;
  dropout.first_token += group.first;
  return dropout;
}

template <typename V>
V rows_of(const V& whole, const RowGroup& group) {
  return whole.slice_rows(group.first, group.rows);
}

/// The same rows of a tensor of the residual stream; of no data, none.
template <typename V>
V own_rows_of(const V& own, const RowGroup& group, const RowGroups& groups) {
  return own.data ? own.slice_rows(groups.residual_row(group), group.rows) : own;
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
View own_sum(const View& residual, const TensorParallel& tp) {
  return tp.sequence ? residual : tp.part(residual, tp.rank());
}

/// Without sequence parallelism every rank needs every rank's sums.
void share_sums(std::span<const View> residuals, TensorParallel& tp, Context& ctx) {
  if (!tp.sequence && tp.size() > 1)
    TokenGather(tp, parts_of(residuals, tp), ctx).wait_all();
}

/// Columnwise copies of the layers that read one input are there together; those of experts, of
/// which there may be a hundred, one after the other.
class Dgrads {
 public:
  Dgrads(std::span<const Linear> linears, int experts, DType dtype, int64_t rows, Context& ctx)
      : together_(experts == 1) {
    for (const Linear& linear : linears)
      operands_.emplace_back(linear, dtype, ctx);
    for (Operand& operand : operands_) {
      if (together_)
        operand.prepare_dgrad(rows);
    }
  }
  void run(size_t index, const View& dx, const Rows& dy, float beta) {
    Operand& operand = operands_[index];
    if (!together_)
      operand.prepare_dgrad(dx.dim(0));
    operand.dgrad(dx, dy, beta);
    if (!together_)
      operand.release();
  }
  void release() {
    for (Operand& operand : operands_) {
      if (together_)
        operand.release();
    }
    operands_.clear();
  }

 private:
  bool together_;
  std::vector<Operand> operands_;
};

}  // namespace

void column_parallel_forward(std::span<const View> ys, const ConstView& x,
                             std::span<const Linear> layers, ParallelSaved* saved,
                             TensorParallel& tp, Context& ctx, std::span<const int64_t> rows,
                             QuantizedActivation x8) {
  const int64_t tokens = ys[0].dim(0);
  const size_t experts = layers.size() / ys.size();
  for (size_t i = 0; i < layers.size(); ++i) {
    check_layer("column_parallel_forward", *layers[i].weight, ys[i / experts], x, tokens,
                tp.residual_rows(tokens));
  }
  const RowGroups groups(rows, tokens, static_cast<int>(experts), tp);
  GatheredRows input(x, std::move(x8), groups, one_kind(layers), tp, ctx);

  // While x travels, its adapters' small products; they travel behind it.
  std::vector<Tensor> xa(ys.size());
  std::vector<View> wholes;
  for (size_t i = 0; i < ys.size(); ++i) {
    const auto of_layer = layers.subspan(i * experts, experts);
    const int64_t r = adapter_rank(of_layer);
    if (r == 0)
      continue;
    xa[i] = small("tp.xa", saved ? Category::kActivations : Category::kWorkspace, x.dtype, tokens,
                  r, ctx);
    for (const RowGroup& group : groups.residual()) {
      const Linear& layer = of_layer[group.expert];
      lora_down(rows_of(xa[i].view(), group), own_rows_of(x, group, groups), *layer.lora,
                mask_of(layer, group), ctx);
    }
    wholes.push_back(xa[i]);
  }
  std::optional<TokenGather> small_gather;
  if (tp.sequence && !wholes.empty())
    small_gather.emplace(tp, parts_of(wholes, tp), ctx);

  std::vector<Operand> operands;
  for (const Linear& layer : layers)
    operands.emplace_back(layer, x.dtype, ctx);
  for (int step = 0; step < input.steps(); ++step) {
    input.wait(step);
    for (size_t g = 0; g < input.groups(step).size(); ++g) {
      const RowGroup& group = input.groups(step)[g];
      if (group.rows == 0)
        continue;
      for (size_t i = 0; i < ys.size(); ++i) {
        operands[i * experts + group.expert].forward(rows_of(ys[i], group), input.rows(step, g),
                                                     true);
      }
    }
  }
  if (small_gather)
    small_gather->wait_all();
  for (size_t i = 0; i < ys.size(); ++i) {
    if (!xa[i])
      continue;
    for (const RowGroup& group : groups.all()) {
      lora_up(rows_of(ys[i], group), rows_of(xa[i].view(), group),
              *layers[i * experts + group.expert].lora, ctx);
    }
  }
  if (saved)
    saved->xa = std::move(xa);
}

void column_parallel_backward(const View& dx, std::span<const ConstView> dys, const ConstView& x,
                              std::span<const Linear> layers, const ParallelSaved& saved,
                              TensorParallel& tp, Context& ctx, std::span<const int64_t> rows) {
  const int64_t tokens = dys[0].dim(0);
  const DType dtype = dys[0].dtype;
  const size_t experts = layers.size() / dys.size();
  const bool wanted = dx.data != nullptr;
  const bool fp8 = one_kind(layers);
  const RowGroups groups(rows, tokens, static_cast<int>(experts), tp);
  std::vector<View> partials;  // of all tokens, by this rank's features
  std::vector<View> sums;      // of the residual stream, complete
  Tensor dx_partial;
  if (wanted) {
    for (size_t i = 0; i < layers.size(); ++i) {
      check_layer("column_parallel_backward", *layers[i].weight, dys[i / experts], dx, tokens,
                  tp.residual_rows(tokens));
    }
    dx_partial = ctx.arena.tensor(Category::kCommunication, "tp.partial", partial_dtype(dtype, tp),
                                  {tokens, dx.dim(1)});
    partials.push_back(dx_partial);
    sums.push_back(dx);
  }
  std::vector<Tensor> dxa_partial(dys.size()), dxa(dys.size());
  for (size_t i = 0; i < dys.size(); ++i) {
    const auto of_layer = layers.subspan(i * experts, experts);
    const int64_t r = adapter_rank(of_layer);
    if (r == 0)
      continue;
    ROWSHARD_CHECK(i < saved.xa.size() && saved.xa[i] && saved.xa[i].shape() == (Shape{tokens, r}),
                   LogicError, "column_parallel_backward: ", of_layer[0].weight->name,
                   " has an adapter but nothing was saved for these tokens");
    dxa_partial[i] = small("tp.dxa_partial", Category::kWorkspace, dtype, tokens, r, ctx);
    for (const RowGroup& group : groups.all()) {
      lora_up_backward(rows_of(dxa_partial[i].view(), group), rows_of(dys[i], group),
                       *of_layer[group.expert].lora, ctx);
    }
    dxa[i] = small("tp.dxa", Category::kWorkspace, dtype, tp.residual_rows(tokens), r, ctx);
    partials.push_back(dxa_partial[i]);
    sums.push_back(dxa[i]);
  }
  if (partials.empty())
    return;

  TokenReduce reduce(tp, parts_of(partials, tp), ctx);
  Dgrads dgrads(wanted ? layers : layers.first(0), groups.experts(), dtype, tokens / tp.size(),
                ctx);
  for (int step = 0; step < tp.size(); ++step) {
    for (const RowGroup& group : groups.of(reduce.rank_at(step))) {
      for (size_t i = 0; i < dys.size() && wanted && group.rows > 0; ++i) {
        const OwnRows dy(rows_of(dys[i], group), fp8, ctx);
        dgrads.run(i * experts + group.expert, rows_of(dx_partial.view(), group), dy.rows,
                   i > 0 ? 1 : 0);
      }
    }
    reduce.send(step);
  }
  dgrads.release();
  // What needs no other rank, while the sums travel.
  for (size_t i = 0; i < dys.size(); ++i) {
    for (const RowGroup& group : groups.all()) {
      if (dxa[i])
        lora_up_gradient(rows_of(dys[i], group), rows_of(ConstView(saved.xa[i]), group),
                         *layers[i * experts + group.expert].lora, ctx);
    }
  }
  std::vector<View> own;
  for (const View& sum : sums)
    own.push_back(own_sum(sum, tp));
  reduce.finish(own);
  share_sums(sums, tp, ctx);
  for (size_t i = 0; i < dys.size(); ++i) {
    for (const RowGroup& group : groups.residual()) {
      const Linear& layer = layers[i * experts + group.expert];
      if (dxa[i] && group.rows > 0)
        lora_down_backward(own_rows_of(dx, group, groups),
                           own_rows_of(ConstView(dxa[i]), group, groups),
                           own_rows_of(x, group, groups), *layer.lora, mask_of(layer, group), ctx);
    }
  }
}

void row_parallel_forward(const View& y, const ConstView& x, std::span<const Linear> experts,
                          ParallelSaved* saved, TensorParallel& tp, Context& ctx,
                          std::span<const int64_t> rows) {
  const int64_t tokens = x.dim(0);
  for (const Linear& expert : experts) {
    check_layer("row_parallel_forward", *expert.weight, y, x, tp.residual_rows(tokens), tokens);
  }
  const bool fp8 = one_kind(experts);
  const RowGroups groups(rows, tokens, static_cast<int>(experts.size()), tp);
  std::vector<View> partials, sums;
  Tensor y_partial = ctx.arena.tensor(Category::kCommunication, "tp.partial",
                                      partial_dtype(y.dtype, tp), {tokens, y.dim(1)});
  partials.push_back(y_partial);
  sums.push_back(y);
  Tensor xa_partial, xa;
  if (const int64_t r = adapter_rank(experts)) {
    xa_partial = small("tp.xa_partial", Category::kWorkspace, x.dtype, tokens, r, ctx);
    for (const RowGroup& group : groups.all()) {
      const Linear& expert = experts[group.expert];
      lora_down(rows_of(xa_partial.view(), group), rows_of(x, group), *expert.lora,
                mask_of(expert, group), ctx);
    }
    if (saved) {  // only backward needs the sum; it travels with the product
      xa = small("tp.xa", Category::kActivations, x.dtype, tp.residual_rows(tokens), r, ctx);
      partials.push_back(xa_partial);
      sums.push_back(xa);
    }
  }
  // One bias is added with the sum; those of experts, which differ by row, with one rank's part.
  const bool own_bias = groups.experts() > 1 && tp.rank() == 0;
  TokenReduce reduce(tp, parts_of(partials, tp), ctx);
  std::vector<Operand> operands;
  for (const Linear& expert : experts)
    operands.emplace_back(expert, x.dtype, ctx);
  for (int step = 0; step < tp.size(); ++step) {
    for (const RowGroup& group : groups.of(reduce.rank_at(step))) {
      if (group.rows == 0)
        continue;
      const OwnRows part(rows_of(x, group), fp8, ctx);
      const View y_part = rows_of(y_partial.view(), group);
      operands[group.expert].forward(y_part, part.rows, own_bias);
      if (xa_partial)
        lora_up(y_part, rows_of(ConstView(xa_partial), group), *experts[group.expert].lora, ctx);
    }
    reduce.send(step);
  }
  std::vector<View> own;
  for (const View& sum : sums)
    own.push_back(own_sum(sum, tp));
  reduce.finish(own, groups.experts() > 1 ? ConstView() : experts[0].weight->bias);
  share_sums(sums, tp, ctx);
  if (saved) {
    saved->xa.clear();
    saved->xa.push_back(std::move(xa));
  }
}

void row_parallel_backward(const View& dx, const ConstView& dy, const ConstView& x,
                           std::span<const Linear> experts, const ParallelSaved& saved,
                           TensorParallel& tp, Context& ctx, std::span<const int64_t> rows) {
  const int64_t r = adapter_rank(experts);
  const bool wanted = dx.data != nullptr;
  if (!wanted && r == 0)
    return;
  const int64_t tokens = wanted ? dx.dim(0) : x.dim(0);
  for (const Linear& expert : experts) {
    if (wanted)
      check_layer("row_parallel_backward", *expert.weight, dy, dx, tp.residual_rows(tokens),
                  tokens);
  }
  const RowGroups groups(rows, tokens, static_cast<int>(experts.size()), tp);
  std::optional<GatheredRows> input;
  if (wanted)
    input.emplace(dy, QuantizedActivation(), groups, one_kind(experts), tp, ctx);

  Tensor dxa;
  std::optional<TokenGather> small_gather;
  if (r > 0) {
    ROWSHARD_CHECK(!saved.xa.empty() && saved.xa[0] &&
                       saved.xa[0].shape() == (Shape{tp.residual_rows(tokens), r}),
                   LogicError, "row_parallel_backward: ", experts[0].weight->name,
                   " has an adapter but nothing was saved for these tokens");
    dxa = small("tp.dxa", Category::kWorkspace, dy.dtype, tokens, r, ctx);
    for (const RowGroup& group : groups.residual()) {
      lora_up_backward(rows_of(dxa.view(), group), own_rows_of(dy, group, groups),
                       *experts[group.expert].lora, ctx);
    }
    if (tp.sequence) {
      const View whole = dxa;
      small_gather.emplace(tp, parts_of({&whole, 1}, tp), ctx);
    }
    for (const RowGroup& group : groups.residual()) {
      if (group.rows > 0)
        lora_up_gradient(own_rows_of(dy, group, groups),
                         own_rows_of(ConstView(saved.xa[0]), group, groups),
                         *experts[group.expert].lora, ctx);
    }
  }
  if (wanted) {
    Dgrads dgrads(experts, groups.experts(), dy.dtype, tokens / input->steps(), ctx);
    for (int step = 0; step < input->steps(); ++step) {
      input->wait(step);
      for (size_t g = 0; g < input->groups(step).size(); ++g) {
        const RowGroup& group = input->groups(step)[g];
        if (group.rows > 0)
          dgrads.run(group.expert, rows_of(dx, group), input->rows(step, g), 0);
      }
    }
    dgrads.release();
  }
  if (small_gather)
    small_gather->wait_all();
  for (const RowGroup& group : groups.all()) {
    const Linear& expert = experts[group.expert];
    if (r > 0)
      lora_down_backward(wanted ? rows_of(dx, group) : dx, rows_of(ConstView(dxa), group),
                         rows_of(x, group), *expert.lora, mask_of(expert, group), ctx);
  }
}

}  // namespace rowshard
