#include "model/decoder_model.h"

#include <algorithm>

#include "layers/cross_entropy.h"
#include "layers/elementwise.h"
#include "layers/embedding.h"
#include "layers/norm.h"

namespace rowshard {

namespace {

// Rows of logits alive at once: bounds the head's scratch at kHeadRows x vocabulary.
constexpr int64_t kHeadRows = 512;

std::optional<Llama3RopeScaling> rope_scaling(const RopeConfig& rope) {
  if (rope.type == RopeType::kDefault)
    return std::nullopt;
  return Llama3RopeScaling{rope.factor, rope.low_freq_factor, rope.high_freq_factor,
                           static_cast<double>(rope.original_max_position_embeddings)};
}

// Brings the units back to their shards when a pass is left by an exception.
class PassGuard {
 public:
  explicit PassGuard(UsageScheduler& scheduler) : scheduler_(&scheduler) {}
  ~PassGuard() {
    if (scheduler_)
      scheduler_->abort();
  }
  void finish() {
    scheduler_->finish();
    scheduler_ = nullptr;
  }

 private:
  UsageScheduler* scheduler_;
};

}  // namespace

struct DeviceBatch::Rows {
  std::vector<int32_t> all, labels, own;
  std::vector<int64_t> of_ranks;

  Rows(size_t tokens, const std::vector<int32_t>& every_label, int ranks, int rank)
      : of_ranks(ranks, 0) {
    ROWSHARD_CHECK(every_label.size() == tokens, ShapeError, "a micro-batch of ", tokens,
                   " ids and ", every_label.size(), " labels");
    const int64_t share = static_cast<int64_t>(tokens) / ranks;
    for (size_t i = 0; i < tokens; ++i) {
      if (every_label[i] < kNoLoss)
        continue;
      all.push_back(static_cast<int32_t>(i));
      labels.push_back(every_label[i]);
      const auto holder = static_cast<int>(static_cast<int64_t>(i) / share);
      ++of_ranks[holder];
      if (holder == rank)
        own.push_back(static_cast<int32_t>(static_cast<int64_t>(i) - rank * share));
    }
  }
};

DeviceBatch::DeviceBatch(const std::vector<int32_t>& ids, const std::vector<int32_t>& labels,
                         const std::vector<int32_t>& bounds, Context& ctx, int ranks, int rank)
    : tokens_(static_cast<int64_t>(ids.size())), ranks_(ranks), rank_(rank) {
  ROWSHARD_CHECK(tokens_ % ranks == 0, ShapeError, "a micro-batch of ", tokens_,
                 " tokens cannot be split over ", ranks, " tensor-parallel ranks");
  Rows rows(ids.size(), labels, ranks, rank);
  labelled_ = static_cast<int64_t>(rows.all.size());
  labelled_of_ranks_ = std::move(rows.of_ranks);
  if (tokens_ == 0)
    return;
  const auto make = [&](const char* name, size_t count) {
    return ctx.arena.tensor(Category::kActivations, name, DType::kI32,
                            {static_cast<int64_t>(count)});
  };
  ids_ = make("batch.ids", ids.size());
  rows_ = make("batch.rows", rows.all.size());
  labels_ = make("batch.labels", rows.labels.size());
  if (ranks > 1)
    own_rows_ = make("batch.own_rows", rows.own.size());
  upload(ids, rows, ctx.stream);
  segments_ = std::make_unique<Segments>(bounds, ctx);
}

void DeviceBatch::upload(const std::vector<int32_t>& ids, const Rows& rows, Stream& stream) {
  const auto send = [&](const Tensor& to, const std::vector<int32_t>& from) {
    copy(to, ConstView(from.data(), DType::kI32, to.shape(), kHost), stream);
  };
  send(ids_, ids);
  send(rows_, rows.all);
  send(labels_, rows.labels);
  if (ranks_ > 1)
    send(own_rows_, rows.own);
}

void DeviceBatch::assign(const std::vector<int32_t>& ids, const std::vector<int32_t>& labels,
                         const std::vector<int32_t>& bounds, Stream& stream) {
  const Rows rows(ids.size(), labels, ranks_, rank_);
  ROWSHARD_CHECK(static_cast<int64_t>(ids.size()) == tokens_ && rows.of_ranks == labelled_of_ranks_,
                 ShapeError, "a micro-batch of ", ids.size(), " tokens, ", rows.all.size(),
                 " with a label, in the place of one of ", tokens_, " and ", labelled_);
  if (tokens_ == 0)
    return;
  upload(ids, rows, stream);
  segments_->assign(bounds, stream);
}

namespace {

BlockShape block_shape(const ModelConfig& config, const DecoderSlice& slice) {
  BlockShape shape{config.hidden_size,    slice.ffn.size(), slice.heads.size(),
                   slice.kv_heads.size(), config.head_dim,  config.rms_norm_eps};
  shape.first_head = slice.heads.begin;
  shape.all_heads = config.heads;
  shape.first_ffn = slice.ffn.begin;
  shape.all_ffn = config.intermediate_size;
  return shape;
}

}  // namespace

DecoderModel::DecoderModel(const ModelConfig& config, const DecoderOptions& options,
                           Communicator& gather_group, Context& ctx, Communicator* regather_group,
                           TensorParallel* tp)
    : config_(config),
      options_(options),
      tp_(tp),
      slice_(tp ? DecoderSlice::make(config, options.linear, tp->size(), tp->rank())
                : DecoderSlice::whole(config)),
      shape_(block_shape(config, slice_)),
      ctx_(ctx),
      units_(config, slice_, options.linear, options.activations, gather_group.size()),
      rope_(config.head_dim, config.max_position_embeddings, config.rope.theta,
            rope_scaling(config.rope), ctx) {
  std::vector<ShardedUnit*> pointers;
  for (const UnitLayout& layout : units_.layouts()) {
    sharded_.push_back(
        std::make_unique<ShardedUnit>(layout, gather_group, ctx.arena, regather_group));
    pointers.push_back(sharded_.back().get());
  }
  scheduler_ = std::make_unique<UsageScheduler>(std::move(pointers), ctx.stream);
  set_plan(options.plan);
}

void DecoderModel::set_plan(const PlanPolicy& policy) {
  options_.plan = policy;
  plans_.clear();
  ++changes_;
}

void DecoderModel::load(UnitSource& source) {
  ++changes_;
  for (auto& unit : sharded_)
    unit->load(source, ctx_.stream);
}

void DecoderModel::load(const Checkpoint& checkpoint) {
  set_source([&checkpoint] { return std::make_unique<CheckpointSource>(checkpoint); });
  load(*source_());
}

void DecoderModel::enter(Phase phase) {
  if (!units_.mx() || phase == Phase::kValidation)
    return;
  std::unique_ptr<UnitSource> source;
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    ShardedUnit& unit = *sharded_[units_.backward_block(layer)];
    if (phase == Phase::kInference && unit.loaded()) {
      unit.drop();
      ++changes_;
    } else if (phase == Phase::kTraining && !unit.loaded()) {
      ROWSHARD_CHECK(
          source_, UsageError, "training begins, but inference has dropped unit ", unit.name(),
          ", and groups of 1x32 cannot be made again from the rowwise copy. Declare where "
          "the weights come from (DecoderModel::set_source), load the model again, or "
          "use the validation phase between training steps, which drops nothing");
      if (!source)
        source = source_();
      unit.load(*source, ctx_.stream);
      ++changes_;
    }
  }
}

const UsagePlan& DecoderModel::training_plan(int64_t lowest_block, Follows follows) {
  if (planned_lowest_ != lowest_block)
    plans_.clear();
  planned_lowest_ = lowest_block;
  UsagePlan& plan = plans_[{Phase::kTraining, follows}];
  if (plan.steps.empty()) {
    plan = UsagePlan::make(Phase::kTraining, units_.training_uses(lowest_block, options_.recompute),
                           units_.count(), options_.plan, follows);
  }
  return plan;
}

const UsagePlan& DecoderModel::forward_plan(Phase phase, Follows follows) {
  UsagePlan& plan = plans_[{phase, follows}];
  if (plan.steps.empty()) {
    PlanPolicy policy = options_.plan;
    policy.keep = false;
    plan = UsagePlan::make(phase, units_.forward_uses(), units_.count(), policy, follows);
  }
  return plan;
}

BlockWeights DecoderModel::block_weights(ShardedUnit& unit, const BlockIndices& at) const {
  const auto plain = [&](int weight) { return weight < 0 ? ConstView() : unit.plain(weight); };
  BlockWeights weights;
  weights.input_norm = plain(at.input_norm);
  weights.post_norm = plain(at.post_norm);
  weights.q_norm = plain(at.q_norm);
  weights.k_norm = plain(at.k_norm);
  for (int i = 0; i < kLinearCount; ++i) {
    const WeightSpec& spec = unit.layout().weights()[at.linear[i]];
    LinearWeight& linear = weights.linear[i];
    linear.name = spec.name;
    const bool columnwise = spec.storage == Storage::kMxColumnwise;
    linear.n = spec.shape[columnwise ? 1 : 0];
    linear.k = spec.shape[columnwise ? 0 : 1];
    if (spec.storage == Storage::kPlain) {
      linear.plain = unit.plain(at.linear[i]);
    } else {
      linear.fp8 = &unit.fp8(at.linear[i]);
    }
    linear.bias = plain(at.bias[i]);
  }
  return weights;
}

BlockAdapters DecoderModel::block_adapters(const AdapterSet* adapters, int64_t layer,
                                           const Dropout& dropout) const {
  BlockAdapters result;
  if (!adapters)
    return result;
  for (int i = 0; i < kLinearCount; ++i)
    result.linear[i] = adapters->factors(layer, i);
  result.dropout = dropout;
  result.dropout.random.stream += layer * kLinearCount;
  return result;
}

Tensor DecoderModel::embed(const DeviceBatch& batch) {
  ShardedUnit& unit = scheduler_->acquire(units_.embedding(), Pass::kForward);
  Tensor x;
  if (batch.tokens() > 0) {
    const ConstView table = unit.plain(units_.embedding_table());
    const int64_t rows = tp_ ? tp_->residual_rows(batch.tokens()) : batch.tokens();
    x = ctx_.arena.tensor(Category::kActivations, "x", options_.activations,
                          {rows, config_.hidden_size});
    if (tp_) {
      vocabulary_parallel_embedding(x, vocabulary_part(table), batch.ids(), *tp_, ctx_);
    } else {
      embedding_lookup(x, table, batch.ids(), ctx_.stream);
    }
  }
  scheduler_->release(units_.embedding(), Pass::kForward);
  return x;
}

void DecoderModel::head_loss(ShardedUnit& unit, const DeviceBatch& batch, const ConstView& x,
                             Argument<double> scale, const View& loss_sum, const View* dx) {
  if (tp_)
    return parallel_head_loss(unit, batch, x, scale, loss_sum, dx);
  const int64_t hidden = config_.hidden_size;
  const Norm norm{.weight = unit.plain(units_.final_norm()), .eps = config_.rms_norm_eps};
  LinearWeight head;
  head.name = "lm_head";
  head.n = config_.vocab_size;
  head.k = hidden;
  head.plain = unit.plain(units_.head_matrix());
  if (dx)
    fill_bytes(*dx, 0, ctx_.stream);
  // Only positions with a label go through the head.
  for (int64_t first = 0; first < batch.labelled(); first += kHeadRows) {
    const int64_t count = std::min(kHeadRows, batch.labelled() - first);
    const auto scratch = [&](const char* name, int64_t cols) {
      return ctx_.arena.tensor(Category::kActivations, name, options_.activations, {count, cols});
    };
    const ConstView rows = batch.rows().slice_rows(first, count);
    Tensor gathered = scratch("head.x", hidden);
    gather_rows(gathered, x, rows, ctx_.stream);
    Tensor normed = scratch("head.normed", hidden);
    Tensor rstd = ctx_.arena.tensor(Category::kActivations, "head.rstd", DType::kF32, {count});
    norm_forward(normed, nullptr, rstd, gathered, norm, ctx_.stream);
    Tensor logits = scratch("head.logits", config_.vocab_size);
    const Linear linear{.weight = &head};
    linear_forward(logits, normed, linear, nullptr, ctx_);
    const ConstView labels = batch.labels().slice_rows(first, count);
    if (!dx) {
      Tensor losses =
          ctx_.arena.tensor(Category::kActivations, "head.losses", DType::kF32, {count});
      token_losses(losses, logits, labels, ctx_.stream);
      sum(loss_sum, losses, true, ctx_);
      continue;
    }
    cross_entropy(loss_sum, logits, labels, scale, ctx_);
    Tensor d_normed = scratch("head.d_normed", hidden);
    LinearSaved nothing;
    linear_backward(d_normed, logits, nothing, linear, false, ctx_);
    logits.reset();
    Tensor d_rows = scratch("head.d_rows", hidden);
    norm_backward(d_rows, d_normed, gathered, norm, rstd, false, {}, ctx_);
    scatter_add_rows(*dx, d_rows, rows, ctx_.stream);
  }
}

VocabularyPart DecoderModel::vocabulary_part(const ConstView& table) const {
  return {table, slice_.vocabulary.begin, config_.vocab_size};
}

void DecoderModel::parallel_head_loss(ShardedUnit& unit, const DeviceBatch& batch,
                                      const ConstView& x, Argument<double> scale,
                                      const View& loss_sum, const View* dx) {
  const int64_t hidden = config_.hidden_size;
  const Norm norm{.weight = unit.plain(units_.final_norm()), .eps = config_.rms_norm_eps};
  // Only positions with a label go through the head: this rank's, or with all tokens here, all.
  const ConstView rows = tp_->sequence ? batch.own_rows() : batch.rows();
  const auto scratch = [&](const char* name) {
    return ctx_.arena.tensor(Category::kActivations, name, options_.activations,
                             {rows.dim(0), hidden});
  };
  Tensor gathered = scratch("head.x");
  gather_rows(gathered, x, rows, ctx_.stream);
  Tensor normed = scratch("head.normed");
  Tensor rstd = ctx_.arena.tensor(Category::kActivations, "head.rstd", DType::kF32, {rows.dim(0)});
  if (rows.dim(0) > 0)  // another rank may have all of them
    norm_forward(normed, nullptr, rstd, gathered, norm, ctx_.stream);
  const Tensor d_normed = dx ? scratch("head.d_normed") : Tensor();
  const View d_view = d_normed;
  vocabulary_parallel_loss(
      loss_sum, dx ? &d_view : nullptr, normed, batch.labels(), batch.labelled_of_ranks(),
      vocabulary_part(unit.plain(units_.head_matrix())), scale, kHeadRows, *tp_, ctx_);
  if (!dx)
    return;
  fill_bytes(*dx, 0, ctx_.stream);
  normed.reset();
  if (rows.dim(0) == 0)
    return;
  const Tensor d_rows = scratch("head.d_rows");
  norm_backward(d_rows, d_normed, gathered, norm, rstd, false, {}, ctx_);
  scatter_add_rows(*dx, d_rows, rows, ctx_.stream);
}

void DecoderModel::train(const DeviceBatch& batch, const AdapterSet& adapters,
                         Argument<double> scale, const View& loss_sum, const Dropout& dropout,
                         Follows follows) {
  const int64_t lowest = adapters.lowest_block();
  enter(Phase::kTraining);
  scheduler_->begin(training_plan(lowest, follows));
  PassGuard guard(*scheduler_);
  const bool empty = batch.tokens() == 0;

  Tensor x = embed(batch);
  std::vector<BlockSaved> saved(config_.layers);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    ShardedUnit& unit = scheduler_->acquire(units_.block(layer), Pass::kForward);
    if (!empty) {
      Tensor y = ctx_.arena.tensor(Category::kActivations, "x", x.dtype(), x.shape());
      const BlockAdapters block = block_adapters(&adapters, layer, dropout);
      saved[layer].x = std::move(x);
      block_forward(y, shape_, block_weights(unit, units_.block_indices()), block, batch.segments(),
                    rope_, saved[layer], tp_, ctx_);
      // Backward never goes below the lowest adapter; with recompute it starts from the input.
      if (layer < lowest) {
        saved[layer] = BlockSaved{};
      } else if (options_.recompute) {
        BlockSaved input;
        input.x = std::move(saved[layer].x);
        saved[layer] = std::move(input);
      }
      x = std::move(y);
    }
    scheduler_->release(units_.block(layer), Pass::kForward);
  }

  // The head's forward and backward are one fused pass over chunks of rows; the plan's two uses of
  // the unit are adjacent, so it is gathered once.
  ShardedUnit& head = scheduler_->acquire(units_.head(), Pass::kForward);
  Tensor dx;
  if (!empty) {
    dx = ctx_.arena.tensor(Category::kActivations, "dx", x.dtype(), x.shape());
    const View dx_view = dx;
    head_loss(head, batch, x, scale, loss_sum, &dx_view);
    x.reset();
  }
  scheduler_->release(units_.head(), Pass::kForward);
  scheduler_->acquire(units_.head(), Pass::kBackward);
  scheduler_->release(units_.head(), Pass::kBackward);

  for (int64_t layer = config_.layers - 1; layer >= lowest; --layer) {
    const BlockAdapters block = block_adapters(&adapters, layer, dropout);
    const int forward_unit = units_.block(layer), backward_unit = units_.backward_block(layer);
    const bool apart = forward_unit != backward_unit;
    ShardedUnit* unit = nullptr;
    if (options_.recompute) {
      unit = &scheduler_->acquire(forward_unit, Pass::kBackward);
      if (!empty) {
        Tensor y = ctx_.arena.tensor(Category::kActivations, "x", dx.dtype(), dx.shape());
        block_forward(y, shape_, block_weights(*unit, units_.block_indices()), block,
                      batch.segments(), rope_, saved[layer], tp_, ctx_);
      }
      if (apart)
        scheduler_->release(forward_unit, Pass::kBackward);
    }
    if (apart || !unit)
      unit = &scheduler_->acquire(backward_unit, Pass::kBackward);
    if (!empty) {
      block_backward(dx, shape_, block_weights(*unit, units_.backward_indices()), block,
                     batch.segments(), rope_, saved[layer], layer > lowest, options_.columnwise,
                     tp_, ctx_);
      saved[layer] = BlockSaved{};
    }
    scheduler_->release(backward_unit, Pass::kBackward);
  }
  guard.finish();
}

Tensor DecoderModel::forward_only(const DeviceBatch& batch, const AdapterSet* adapters) {
  if (tp_)
    tp_->waits.reset();  // only a training step's waits are reported
  Tensor x = embed(batch);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    ShardedUnit& unit = scheduler_->acquire(units_.block(layer), Pass::kForward);
    if (batch.tokens() > 0) {
      Tensor y = ctx_.arena.tensor(Category::kActivations, "x", x.dtype(), x.shape());
      BlockSaved saved;
      saved.x = std::move(x);
      block_forward(y, shape_, block_weights(unit, units_.block_indices()),
                    block_adapters(adapters, layer, Dropout{}), batch.segments(), rope_, saved, tp_,
                    ctx_);
      x = std::move(y);
    }
    scheduler_->release(units_.block(layer), Pass::kForward);
  }
  return x;
}

void DecoderModel::evaluate(const DeviceBatch& batch, const AdapterSet* adapters,
                            const View& loss_sum, Follows follows) {
  scheduler_->begin(forward_plan(Phase::kValidation, follows));
  PassGuard guard(*scheduler_);
  Tensor x = forward_only(batch, adapters);
  ShardedUnit& head = scheduler_->acquire(units_.head(), Pass::kForward);
  if (batch.tokens() > 0)
    head_loss(head, batch, x, 0, loss_sum, nullptr);
  scheduler_->release(units_.head(), Pass::kForward);
  guard.finish();
}

// All tokens of a residual stream that is split; empty where it is not.
Tensor DecoderModel::gather_tokens(const ConstView& x, int64_t tokens) {
  if (!tp_ || !tp_->sequence)
    return {};
  Tensor all =
      ctx_.arena.tensor(Category::kCommunication, "tp.tokens", x.dtype, {tokens, x.dim(1)});
  RankParts parts(tp_->size());
  for (int rank = 0; rank < tp_->size(); ++rank)
    parts[rank] = {tp_->part(all.view(), rank)};
  copy(parts[tp_->rank()][0], x, ctx_.stream);
  TokenGather(*tp_, std::move(parts), ctx_).wait_all();
  return all;
}

void DecoderModel::logits(const DeviceBatch& batch, const AdapterSet* adapters,
                          const ConstView& rows, const View& logits) {
  enter(Phase::kInference);
  scheduler_->begin(forward_plan(Phase::kInference));
  PassGuard guard(*scheduler_);
  Tensor x = forward_only(batch, adapters);
  ShardedUnit& unit = scheduler_->acquire(units_.head(), Pass::kForward);
  const int64_t count = rows.dim(0);
  const auto scratch = [&](const char* name, int64_t cols) {
    return ctx_.arena.tensor(Category::kActivations, name, options_.activations, {count, cols});
  };
  Tensor all = gather_tokens(x, batch.tokens());
  Tensor gathered = scratch("head.x", config_.hidden_size);
  gather_rows(gathered, all ? all : x, rows, ctx_.stream);
  Tensor normed = scratch("head.normed", config_.hidden_size);
  Tensor rstd = ctx_.arena.tensor(Category::kActivations, "head.rstd", DType::kF32, {count});
  const Norm norm{.weight = unit.plain(units_.final_norm()), .eps = config_.rms_norm_eps};
  norm_forward(normed, nullptr, rstd, gathered, norm, ctx_.stream);
  Tensor result = scratch("head.logits", config_.vocab_size);
  const ConstView table = unit.plain(units_.head_matrix());
  if (tp_) {
    std::vector<int64_t> widths;
    for (int rank = 0; rank < slice_.ranks; ++rank)
      widths.push_back(slice_.of(config_, rank).vocabulary.size());
    vocabulary_parallel_logits(result, normed, vocabulary_part(table), widths, *tp_, ctx_);
  } else {
    LinearWeight head;
    head.name = "lm_head";
    head.n = config_.vocab_size;
    head.k = config_.hidden_size;
    head.plain = table;
    linear_forward(result, normed, Linear{.weight = &head}, nullptr, ctx_);
  }
  convert(logits, result, ctx_.stream);
  scheduler_->release(units_.head(), Pass::kForward);
  guard.finish();
}

}  // namespace rowshard
