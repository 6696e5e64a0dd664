#include "layers/vocabulary_parallel.h"

#include <algorithm>

#include "core/matmul.h"
#include "layers/cross_entropy.h"
#include "layers/dispatch.h"
#include "layers/elementwise.h"
#include "layers/embedding.h"

namespace rowshard {

namespace {

/// The table in the dtype of the activations: itself, or converted into scratch.
struct Table {
  Tensor scratch;
  ConstView view;

  Table(const ConstView& table, DType dtype, Context& ctx) : view(table) {
    if (table.dtype == dtype)
      return;
    scratch = ctx.arena.tensor(Category::kWorkspace, "linear.converted", dtype, table.shape);
    convert(scratch, table, ctx.stream);
    view = scratch;
  }
};

/// Rank r's rows of a tensor of all ranks' rows.
RankParts cut_by(const View& whole, std::span<const int64_t> counts) {
  RankParts parts;
  int64_t first = 0;
  for (const int64_t count : counts) {
    parts.push_back({whole.slice_rows(first, count)});
    first += count;
  }
  return parts;
}

}  // namespace

void vocabulary_parallel_embedding(const View& y, const VocabularyPart& part, const ConstView& ids,
                                   TensorParallel& tp, Context& ctx) {
  const int64_t tokens = ids.dim(0);
  const Tensor partial =
      ctx.arena.tensor(Category::kCommunication, "tp.partial", y.dtype, {tokens, y.dim(1)});
  RankParts parts(tp.size());
  for (int rank = 0; rank < tp.size(); ++rank)
    parts[rank] = {tp.part(partial.view(), rank)};
  TokenReduce reduce(tp, std::move(parts), ctx);
  for (int step = 0; step < tp.size(); ++step) {
    const int rank = reduce.rank_at(step);
    embedding_lookup_part(tp.part(partial.view(), rank), part.table, part.first, part.vocabulary,
                          tp.part(ids, rank), ctx.stream);
    reduce.send(step);
  }
  const View own = tp.sequence ? y : tp.part(y, tp.rank());
  reduce.finish({&own, 1});
  if (tp.sequence || tp.size() == 1)
    return;
  RankParts shares(tp.size());
  for (int rank = 0; rank < tp.size(); ++rank)
    shares[rank] = {tp.part(y, rank)};
  TokenGather(tp, std::move(shares), ctx).wait_all();
}

void vocabulary_parallel_loss(const View& loss_sum, const View* d_rows, const ConstView& rows,
                              const ConstView& labels, std::span<const int64_t> counts,
                              const VocabularyPart& head, Argument<double> scale, int64_t chunk,
                              TensorParallel& tp, Context& ctx) {
  const int64_t all = labels.elements(), hidden = head.table.dim(1);
  const DType dtype = rows.dtype;
  ROWSHARD_CHECK(static_cast<int>(counts.size()) == tp.size() &&
                     rows.shape == Shape({tp.sequence ? counts[tp.rank()] : all, hidden}),
                 ShapeError, "vocabulary_parallel_loss: ", all, " labels over ", tp.size(),
                 " ranks, rows ", describe(rows));
  if (all == 0)
    return;
  Tensor gathered;
  ConstView whole = rows;
  if (tp.sequence) {
    gathered = ctx.arena.tensor(Category::kCommunication, "tp.tokens", dtype, {all, hidden});
    RankParts parts = cut_by(gathered, counts);
    copy(parts[tp.rank()][0], rows, ctx.stream);
    TokenGather(tp, std::move(parts), ctx).wait_all();
    whole = gathered;
  }
  Tensor partial;
  if (d_rows)
    partial = ctx.arena.tensor(Category::kCommunication, "tp.partial", dtype, {all, hidden});
  const Table table(head.table, dtype, ctx);
  for (int64_t first = 0; first < all; first += chunk) {
    const int64_t count = std::min(chunk, all - first);
    const ConstView x = whole.slice_rows(first, count), target = labels.slice_rows(first, count);
    const Tensor logits =
        ctx.arena.tensor(Category::kActivations, "head.logits", dtype, {count, head.table.dim(0)});
    matmul(logits, x, Transpose::kNo, table.view, Transpose::kYes, 1, 0, ctx);
    const Tensor statistics = ctx.arena.tensor(Category::kCommunication, "head.statistics",
                                               DType::kF64, {tp.size(), 3, count});
    const View own = statistics.view().slice_rows(tp.rank(), 1).reshape(Shape{3, count});
    softmax_statistics(own, logits, target, head.first, head.vocabulary, ctx.stream);
    tp.group.all_gather(statistics, own, ctx.stream);
    const Tensor losses =
        ctx.arena.tensor(Category::kActivations, "head.losses", accumulator_dtype(dtype), {count});
    losses_of_statistics(losses, statistics, ctx.stream);
    sum(loss_sum, losses, true, ctx);
    if (!partial)
      continue;
    cross_entropy_gradient(logits, statistics, target, head.first, scale, ctx.stream);
    matmul(partial.view().slice_rows(first, count), logits, Transpose::kNo, table.view,
           Transpose::kNo, 1, 0, ctx);
  }
  if (!partial)
    return;
  if (tp.sequence) {
    TokenReduce reduce(tp, cut_by(partial, counts), ctx);
    for (int step = 0; step < tp.size(); ++step)
      reduce.send(step);
    reduce.finish({d_rows, 1});
    return;
  }
  // Every rank keeps all rows: sums of equal runs of rows, then everybody's.
  std::vector<int64_t> even(tp.size());
  for (int rank = 0; rank < tp.size(); ++rank)
    even[rank] = all * (rank + 1) / tp.size() - all * rank / tp.size();
  TokenReduce reduce(tp, cut_by(partial, even), ctx);
  for (int step = 0; step < tp.size(); ++step)
    reduce.send(step);
  const RankParts sums = cut_by(*d_rows, even);
  reduce.finish({&sums[tp.rank()][0], 1});
  TokenGather(tp, sums, ctx).wait_all();
}

void vocabulary_parallel_logits(const View& logits, const ConstView& rows,
                                const VocabularyPart& head, std::span<const int64_t> widths,
                                TensorParallel& tp, Context& ctx) {
  const int64_t count = rows.dim(0);
  const Table table(head.table, rows.dtype, ctx);
  const Tensor part = ctx.arena.tensor(Category::kActivations, "head.logits", rows.dtype,
                                       {count, head.table.dim(0)});
  matmul(part, rows, Transpose::kNo, table.view, Transpose::kYes, 1, 0, ctx);
  for (int64_t row = 0; row < count; ++row) {
    tp.group.all_gather_v(logits.slice_rows(row, 1), part.view().slice_rows(row, 1), widths,
                          ctx.stream);
  }
}

}  // namespace rowshard
