#include "finetune/step_graphs.h"

#include "core/log.h"

namespace rowshard {

StepGraphs::StepGraphs(Job& job, AdapterSet& adapters, AdapterOptimizer& optimizer,
                       const View& loss_sum)
    : job_(job), adapters_(adapters), optimizer_(optimizer), loss_sum_(loss_sum) {
  const Context& ctx = job.context();
  ROWSHARD_CHECK(ctx.device().is_cuda(), ConfigError,
                 "--cuda-graph true: the host has no graphs; use --device cuda, or leave it false");
  ROWSHARD_CHECK(job.world().size() == 1, ConfigError, "--cuda-graph true on ", job.world().size(),
                 " ranks is not in this version: collectives are not recorded; leave it false");
  numbers_ = ctx.arena.tensor(Category::kOptimizer, "step.numbers", DType::kU8,
                              {static_cast<int64_t>(sizeof(Numbers))});
  changes_ = job.model().changes();
}

StepGraphs::Shape StepGraphs::shape_of(const MicroBatch& batch) const {
  const DecoderModel& model = job_.model();
  const DecoderSlice& slice = model.slice();
  Shape shape = attention_layout(batch.cu_seqlens, slice.heads.size(), slice.kv_heads.size(),
                                 model.config().head_dim);
  shape.push_back(batch.tokens());
  shape.push_back(batch.head_tokens);
  return shape;
}

void StepGraphs::queue(const DeviceBatch& batch, Dropout dropout) {
  const auto* numbers = static_cast<const Numbers*>(numbers_.view().data);
  dropout.random.stream = 0;
  dropout.base = Argument<uint64_t>::at(&numbers->dropout_stream);
  job_.model().train(batch, adapters_, Argument<double>::at(&numbers->scale), loss_sum_, dropout);
}

// What the work allocates it must give back: a buffer that stayed would be made once, by a step
// that never ran.
void StepGraphs::capture(Graph& graph, const std::function<void()>& work) {
  Context& ctx = job_.context();
  const int64_t before = ctx.arena.total().now;
  ctx.arena.trim();  // what the step before this used; the recording has blocks of its own
  {
    const ArenaRecording recording(ctx.arena);
    graph.capture(ctx.stream, work);
  }
  ROWSHARD_CHECK(ctx.arena.total().now == before, LogicError, "a recorded step keeps ",
                 ctx.arena.total().now - before, " bytes of the arena");
}

void StepGraphs::record(Recording& recording, const MicroBatch& batch, const Dropout& dropout) {
  recording.batch = std::make_unique<DeviceBatch>(
      job_.model().batch(batch.input_ids, batch.labels, batch.cu_seqlens));
  capture(recording.graph, [&] { queue(*recording.batch, dropout); });
  ++recorded_;
  log(message("cuda graph ", recorded_, " of at most ", kMostShapes, ": micro-batches of ",
              batch.tokens(), " tokens, ", batch.head_tokens, " through the head, ",
              batch.cu_seqlens.size() - 1, " segment(s); ", recording.graph.nodes(), " nodes"));
  if (recorded_ == kMostShapes)
    log("cuda graphs: micro-batches of further shapes run without one, which is slower");
}

void StepGraphs::train(const MicroBatch& batch, double scale, const Dropout& dropout) {
  Context& ctx = job_.context();
  if (changes_ != job_.model().changes()) {
    shapes_.clear();
    recorded_ = 0;
    changes_ = job_.model().changes();
  }
  const Numbers numbers{scale, dropout.random.stream};
  copy(numbers_, ConstView(&numbers, DType::kU8, numbers_.shape(), kHost), ctx.stream);
  const auto [at, first] = shapes_.try_emplace(shape_of(batch));
  Recording& recording = at->second;
  if (!recording.graph.recorded()) {
    if (first || recorded_ == kMostShapes || batch.tokens() == 0) {
      queue(job_.model().batch(batch.input_ids, batch.labels, batch.cu_seqlens), dropout);
      return;
    }
    record(recording, batch, dropout);
  } else {
    recording.batch->assign(batch.input_ids, batch.labels, batch.cu_seqlens, ctx.stream);
  }
  recording.graph.replay(ctx.stream);
  ++replayed_;
}

void StepGraphs::update(double lr, int64_t step) {
  optimizer_.prepare(lr, step);
  if (!updated_) {
    optimizer_.queue();
    updated_ = true;
    return;
  }
  if (!update_.recorded())
    capture(update_, [&] { optimizer_.queue(); });
  update_.replay(job_.context().stream);
}

}  // namespace rowshard
