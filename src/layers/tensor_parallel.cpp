#include "layers/tensor_parallel.h"

namespace rowshard {

int64_t TensorParallel::share(int64_t tokens) const {
  ROWSHARD_CHECK(tokens % size() == 0, ShapeError, tokens, " tokens cannot be split over ", size(),
                 " tensor-parallel ranks; pad the micro-batch to a multiple of ", size());
  return tokens / size();
}

View TensorParallel::part(const View& whole, int rank) const {
  const int64_t rows = share(whole.dim(0));
  return whole.slice_rows(rank * rows, rows);
}

ConstView TensorParallel::part(const ConstView& whole, int rank) const {
  const int64_t rows = share(whole.dim(0));
  return whole.slice_rows(rank * rows, rows);
}

TokenGather::TokenGather(TensorParallel& tp, RankParts parts, Context& ctx) : tp_(tp), ctx_(ctx) {
  const int rank = tp.rank(), size = tp.size();
  const std::vector<ConstView> own(parts[rank].begin(), parts[rank].end());
  Event ready(ctx.device());
  ready.record(ctx.stream);
  tp.stream.wait(ready);
  for (int step = 1; step < size; ++step) {
    tp.group.exchange(own, (rank + step) % size, parts[rank_at(step)], rank_at(step), tp.stream);
    arrivals_.emplace_back(ctx.device());
    arrivals_.back().record(tp.stream);
  }
  if (!tp.overlap)
    wait_all();
}

void TokenGather::wait(int step) {
  if (step == 0 || arrivals_.empty())
    return;
  tp_.waits.wait(ctx_.stream, arrivals_[step - 1]);
}

void TokenGather::wait_all() {
  if (!arrivals_.empty())  // one stream: the last is through when all are
    tp_.waits.wait(ctx_.stream, arrivals_.back());
  if (ctx_.device().is_host()) {
    for (const Event& arrival : arrivals_)
      ctx_.stream.wait(arrival);
  }
  arrivals_.clear();
}

TokenReduce::TokenReduce(TensorParallel& tp, RankParts partials, Context& ctx)
    : tp_(tp), ctx_(ctx), partials_(std::move(partials)) {
  for (int step = 0; step + 1 < tp.size(); ++step) {
    received_.emplace_back();
    for (const View& own : partials_[tp.rank()]) {
      received_.back().push_back(
          ctx.arena.tensor(Category::kCommunication, "tp.received", own.dtype, own.shape));
    }
  }
  // What is received may lie where earlier work still reads.
  Event ready(ctx.device());
  ready.record(ctx.stream);
  tp.stream.wait(ready);
}

void TokenReduce::exchange(int step) {
  const int to = rank_at(step);
  const int from = (tp_.rank() - 1 - step + tp_.size()) % tp_.size();
  const std::vector<ConstView> send(partials_[to].begin(), partials_[to].end());
  const std::vector<View> receive(received_[step].begin(), received_[step].end());
  tp_.group.exchange(send, to, receive, from, tp_.stream);
  arrivals_.emplace_back(ctx_.device());
  arrivals_.back().record(tp_.stream);
}

void TokenReduce::send(int step) {
  ROWSHARD_CHECK(step == sent_, LogicError, "partial sums of step ", step, " sent after ", sent_,
                 " steps");
  ++sent_;
  if (step + 1 == tp_.size() || !tp_.overlap)
    return;
  Event made(ctx_.device());
  made.record(ctx_.stream);
  tp_.stream.wait(made);
  exchange(step);
}

void TokenReduce::finish(std::span<const View> sums, const ConstView& bias) {
  const int rank = tp_.rank(), size = tp_.size();
  ROWSHARD_CHECK(sent_ == size, LogicError, "partial sums of ", sent_, " of ", size,
                 " ranks were made");
  if (!tp_.overlap && size > 1) {
    Event made(ctx_.device());
    made.record(ctx_.stream);
    tp_.stream.wait(made);
    for (int step = 0; step + 1 < size; ++step)
      exchange(step);
  }
  if (!arrivals_.empty())
    tp_.waits.wait(ctx_.stream, arrivals_.back());
  if (ctx_.device().is_host()) {
    for (const Event& arrival : arrivals_)
      ctx_.stream.wait(arrival);
  }
  arrivals_.clear();
  for (size_t buffer = 0; buffer < sums.size(); ++buffer) {
    std::vector<ConstView> parts(size);
    for (int from = 0; from < size; ++from) {
      parts[from] = from == rank ? ConstView(partials_[rank][buffer])
                                 : ConstView(received_[(rank - 1 - from + size) % size][buffer]);
    }
    sum_parts(sums[buffer], parts, buffer == 0 ? bias : ConstView(), ctx_.stream);
  }
  received_.clear();
}

}  // namespace rowshard
