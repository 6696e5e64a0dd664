#include "finetune/adapter_optimizer.h"

#include <algorithm>

#include "core/trace.h"
#include "finetune/gradient_clip.h"
#include "layers/elementwise.h"

namespace rowshard {

AdapterOptimizer::AdapterOptimizer(AdapterSet& adapters, Communicator& group, double weight_decay,
                                   double clip_norm, Context& ctx,
                                   const TensorParallelGroups& tensor_parallel)
    : adapters_(adapters),
      group_(group),
      tensor_parallel_(tensor_parallel),
      ctx_(ctx),
      clip_norm_(clip_norm) {
  hyper_.weight_decay = weight_decay;
  const int64_t part = adapters.count() / group.size();
  const auto vector = [&](Category category, const char* name) {
    Tensor tensor = ctx.arena.tensor(category, name, DType::kF32, {part});
    fill_bytes(tensor, 0, ctx.stream);
    return tensor;
  };
  m_ = vector(Category::kOptimizer, "adamw.m");
  v_ = vector(Category::kOptimizer, "adamw.v");
  gradient_part_ = vector(Category::kAdapter, "adapter.gradient_part");
  squares_ = ctx.arena.tensor(Category::kOptimizer, "gradient.squares", DType::kF64, {1});
  clip_ = ctx.arena.tensor(Category::kOptimizer, "gradient.clip", DType::kF32, {2});
  constants_ = ctx.arena.tensor(Category::kOptimizer, "adamw.constants", DType::kU8,
                                {static_cast<int64_t>(sizeof(AdamWConstants))});
}

View AdapterOptimizer::part(const View& flat) const {
  const int64_t size = flat.elements() / group_.size();
  return flat.slice_rows(group_.rank() * size, size);
}

ConstView AdapterOptimizer::part(const ConstView& flat) const {
  const int64_t size = flat.elements() / group_.size();
  return flat.slice_rows(group_.rank() * size, size);
}

View AdapterOptimizer::reduced(int64_t begin, int64_t end) const {
  const int64_t size = gradient_part_.view().elements(), first = group_.rank() * size;
  const int64_t from = std::clamp<int64_t>(begin - first, 0, size);
  const int64_t to = std::clamp<int64_t>(end - first, 0, size);
  return gradient_part_.view().slice_rows(from, to - from);
}

// After the sum over the data-parallel ranks: a rank then holds less to send. Tensor-parallel ranks
// cut their vectors alike, so what one holds a part of, the others do too.
void AdapterOptimizer::sum_over_tensor_parallel() {
  const TensorParallelGroups& groups = tensor_parallel_;
  if (groups.tp && groups.sequence) {
    groups.tp->all_reduce(reduced(0, adapters_.replicated()), Reduction::kSum, ctx_.stream);
  }
  if (groups.kv) {
    groups.kv->all_reduce(reduced(adapters_.replicated(), adapters_.kv_replicated()),
                          Reduction::kSum, ctx_.stream);
  }
}

void AdapterOptimizer::squares_of_own_part() {
  const TensorParallelGroups& groups = tensor_parallel_;
  if (!groups.tp) {
    sum_of_squares(squares_, gradient_part_, false, ctx_);
    return;
  }
  // What several ranks hold is counted by the first of them.
  fill_bytes(squares_, 0, ctx_.stream);
  const auto count = [&](int64_t begin, int64_t end) {
    const View part = reduced(begin, end);
    if (part.elements() > 0)
      sum_of_squares(squares_, part, true, ctx_);
  };
  if (groups.tp->rank() == 0)
    count(0, adapters_.replicated());
  if (!groups.kv || groups.kv->rank() == 0)
    count(adapters_.replicated(), adapters_.kv_replicated());
  count(adapters_.kv_replicated(), adapters_.count());
}

void AdapterOptimizer::prepare(double lr, int64_t step) {
  hyper_.lr = lr;
  const AdamWConstants constants = adamw_constants(hyper_, step);
  copy(constants_, ConstView(&constants, DType::kU8, constants_.shape(), kHost), ctx_.stream);
}

void AdapterOptimizer::queue() {
  Stream& stream = ctx_.stream;
  size_t used = 0;
  const auto timed = [&](const char* name, int64_t bytes, const auto& collective) {
    const TraceSpan span(stream, TraceLane::kReductions, name, bytes);
    if (collectives_.size() == used)
      collectives_.emplace_back(Event(stream.device(), true), Event(stream.device(), true));
    collectives_[used].first.record(stream);
    collective();
    collectives_[used++].second.record(stream);
  };
  const View gradients = adapters_.gradients();
  const int64_t received = gradients.bytes() - gradients.bytes() / group_.size();
  timed("reduce gradients", received,
        [&] { group_.reduce_scatter(gradient_part_, gradients, Reduction::kSum, stream); });
  if (tensor_parallel_.tp)
    timed("sum over tp", 0, [&] { sum_over_tensor_parallel(); });
  squares_of_own_part();
  timed("global norm", squares_.view().bytes(), [&] {
    group_.all_reduce(squares_, Reduction::kSum, stream);
    if (tensor_parallel_.tp)
      tensor_parallel_.tp->all_reduce(squares_, Reduction::kSum, stream);
  });
  gradient_scale(clip_, squares_, clip_norm_, stream);

  AdamWVectors vectors;
  vectors.parameters = part(adapters_.parameters());
  vectors.gradients = gradient_part_;
  vectors.m = m_;
  vectors.v = v_;
  vectors.gradient_scale = clip_.view().slice_rows(0, 1);
  adamw(vectors,
        Argument<AdamWConstants>::at(static_cast<const AdamWConstants*>(constants_.view().data)),
        stream);
  timed("gather parameters", received,
        [&] { group_.all_gather(adapters_.parameters(), vectors.parameters, stream); });
  adapters_.refresh_compute(stream);
}

double AdapterOptimizer::reduction_seconds() const {
  double ms = 0;
  for (const auto& [begin, end] : collectives_)
    ms += group_.size() > 1 || tensor_parallel_.tp ? elapsed_ms(begin, end) : 0;
  return ms * 1e-3;
}

double AdapterOptimizer::gradient_norm() const {
  float norm = 0;
  copy(View(&norm, DType::kF32, {1}, kHost), clip_.view().slice_rows(1, 1), ctx_.stream);
  ctx_.stream.synchronize();
  return norm;
}

}  // namespace rowshard
