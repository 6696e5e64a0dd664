// A frozen decoder with adapters: units, scheduler, and the passes over a micro-batch.
//
// The model owns its sharded units and its RoPE table; adapters are owned by the caller
// (AdapterSet) because inference runs without them. One micro-batch at a time. All ranks of the
// gather group call the same passes in the same order, also with an empty micro-batch (0 tokens),
// which gathers with the others and computes nothing.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "layers/vocabulary_parallel.h"
#include "model/adapter_set.h"
#include "model/decoder_block.h"
#include "model/decoder_units.h"
#include "model/weight_source.h"
#include "shard/usage_scheduler.h"

namespace rowshard {

struct DecoderOptions {
  Storage linear =
      Storage::kFp8Block;  // of the blocks' linear weights; kMxRowwise, or kPlain: bf16
  DType activations = DType::kF32;
  PlanPolicy plan;
  ColumnwisePolicy columnwise = ColumnwisePolicy::kRelease;
  bool recompute = false;  // keep each block's input only, and run its forward again in backward
};

/// A micro-batch on the device.
class DeviceBatch {
 public:
  /// ids, labels (shifted; -100 where nothing is trained; kNoLoss where nothing is trained either,
  /// but the row goes through the head) of one length; cumulative segment bounds.
  /// With tensor parallelism the tokens are a multiple of `ranks`, and equal on all of them.
  DeviceBatch(const std::vector<int32_t>& ids, const std::vector<int32_t>& labels,
              const std::vector<int32_t>& bounds, Context& ctx, int ranks = 1, int rank = 0);

  /// Another micro-batch of as many tokens and labels, at the same device addresses: for a graph
  /// that was recorded with this one.
  void assign(const std::vector<int32_t>& ids, const std::vector<int32_t>& labels,
              const std::vector<int32_t>& bounds, Stream& stream);

  int64_t tokens() const { return tokens_; }
  int64_t labelled() const { return labelled_; }
  ConstView ids() const { return ids_; }                   // [T] i32
  ConstView rows() const { return rows_; }                 // [labelled] i32, those for the head
  ConstView labels() const { return labels_; }             // [labelled] i32
  const Segments& segments() const { return *segments_; }  // only with tokens() > 0
  /// Labels among the tokens of each tensor-parallel rank, and the rows of this rank's, counted
  /// from its first token.
  const std::vector<int64_t>& labelled_of_ranks() const { return labelled_of_ranks_; }
  ConstView own_rows() const { return own_rows_; }

 private:
  struct Rows;  // what the labels say
  void upload(const std::vector<int32_t>& ids, const Rows& rows, Stream& stream);

  int64_t tokens_ = 0, labelled_ = 0;
  int ranks_ = 1, rank_ = 0;
  std::vector<int64_t> labelled_of_ranks_;
  Tensor ids_, rows_, labels_, own_rows_;
  std::unique_ptr<Segments> segments_;
};

class DecoderModel {
 public:
  /// `gather_group`: the ranks that share this rank's part of the weights (dp_shard).
  /// `regather_group` only for ReshardMode::kGroup. `tp`: the ranks that compute a micro-batch
  /// together, each a slice of every layer; null for one.
  DecoderModel(const ModelConfig& config, const DecoderOptions& options, Communicator& gather_group,
               Context& ctx, Communicator* regather_group = nullptr, TensorParallel* tp = nullptr);

  /// Reads this rank's parts. Collective.
  void load(UnitSource& source);
  /// The checkpoint is also where copies come from that inference dropped; it outlives the model.
  void load(const Checkpoint& checkpoint);
  /// Inference drops the columnwise copies of MX weights, which cannot be made of the rowwise ones.
  /// When training begins again they are read from here; without it, that is a UsageError, the same
  /// on all ranks and before any collective.
  using SourceMaker = std::function<std::unique_ptr<UnitSource>()>;
  void set_source(SourceMaker source) { source_ = std::move(source); }

  const ModelConfig& config() const { return config_; }
  const DecoderOptions& options() const { return options_; }
  const DecoderUnits& units() const { return units_; }
  const DecoderSlice& slice() const { return slice_; }
  /// A micro-batch as `train`, `evaluate` and `logits` want it.
  DeviceBatch batch(const std::vector<int32_t>& ids, const std::vector<int32_t>& labels,
                    const std::vector<int32_t>& bounds) const {
    return DeviceBatch(ids, labels, bounds, ctx_, slice_.ranks, slice_.rank);
  }
  UsageScheduler& scheduler() { return *scheduler_; }
  /// The reshard mode and prefetch depth from the next pass on.
  void set_plan(const PlanPolicy& policy);

  /// How often weights were loaded or dropped, or the plan was changed: what was recorded before
  /// (core/graph.h) must not be replayed after.
  int64_t changes() const { return changes_; }

  /// Adds Σ loss to loss_sum [1] f64 and leaves gradients of (Σ loss · scale) in the adapters.
  /// `dropout` has a random stream of its own for this micro-batch; each adapter offsets it. May be
  /// recorded, after the same shape was trained once (attention_layout, layers/linear.h), when
  /// nothing follows. `follows`: whether another `train` comes next, whose first gathers then begin
  /// here.
  void train(const DeviceBatch& batch, const AdapterSet& adapters, Argument<double> scale,
             const View& loss_sum, const Dropout& dropout, Follows follows = Follows::kNothing);
  /// Adds Σ loss to loss_sum. Drops and makes nothing that training needs. `follows`: another
  /// `evaluate`.
  void evaluate(const DeviceBatch& batch, const AdapterSet* adapters, const View& loss_sum,
                Follows follows = Follows::kNothing);
  /// logits [rows, V] f32 at the given rows of the batch.
  void logits(const DeviceBatch& batch, const AdapterSet* adapters, const ConstView& rows,
              const View& logits);

  /// The usage plans of this model; they live until the next call with another policy or block.
  const UsagePlan& training_plan(int64_t lowest_block, Follows follows = Follows::kNothing);
  const UsagePlan& forward_plan(Phase phase, Follows follows = Follows::kNothing);

 private:
  void enter(Phase phase);
  BlockWeights block_weights(ShardedUnit& unit, const BlockIndices& at) const;
  BlockAdapters block_adapters(const AdapterSet* adapters, int64_t layer,
                               const Dropout& dropout) const;
  Tensor embed(const DeviceBatch& batch);
  Tensor gather_tokens(const ConstView& x, int64_t tokens);
  Tensor forward_only(const DeviceBatch& batch, const AdapterSet* adapters);
  void head_loss(ShardedUnit& unit, const DeviceBatch& batch, const ConstView& x,
                 Argument<double> scale, const View& loss_sum, const View* dx);
  void parallel_head_loss(ShardedUnit& unit, const DeviceBatch& batch, const ConstView& x,
                          Argument<double> scale, const View& loss_sum, const View* dx);
  VocabularyPart vocabulary_part(const ConstView& table) const;

  ModelConfig config_;
  DecoderOptions options_;
  TensorParallel* tp_;
  DecoderSlice slice_;
  BlockShape shape_;
  Context& ctx_;
  DecoderUnits units_;
  std::vector<std::unique_ptr<ShardedUnit>> sharded_;
  std::unique_ptr<UsageScheduler> scheduler_;
  RopeTable rope_;
  std::map<std::pair<Phase, Follows>, UsagePlan> plans_;
  int64_t planned_lowest_ = -1;
  int64_t changes_ = 0;
  SourceMaker source_;
};

}  // namespace rowshard
