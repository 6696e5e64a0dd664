// What finetune, evaluate and generate share: the checkpoint, the mesh, the communicators and the
// model on this rank's device.
//
// Collective over the world: every rank makes a Job from the same options (they are compared before
// the first collective) and destroys it in the same order.
#pragma once

#include <memory>
#include <optional>

#include "comm/world.h"
#include "finetune/adapter_optimizer.h"
#include "finetune/options.h"
#include "finetune/reporter.h"
#include "model/decoder_model.h"

namespace rowshard {

/// The device kind the options ask for on this machine; DeviceError when cuda is asked for and
/// cannot be had.
DeviceKind resolve_device(DeviceChoice choice);

/// seq_len 0 means min(model's maximum, 1024); ConfigError when it is longer than the model's.
int64_t resolve_seq_len(int64_t seq_len, const ModelConfig& config);

/// The reshard mode and prefetch depth that the options ask for.
PlanPolicy plan_policy(const ExecutionOptions& execution);
/// The ranks of the world over which `rank` shards a unit again after forward, of those in
/// `gather_group`, which are consecutive; empty unless the mode is a group size. ConfigError when
/// the size does not divide them.
std::vector<int> regather_ranks(const ReshardAfterForward& reshard,
                                const std::vector<int>& gather_group, int rank);

/// How the options map on the model; ConfigError for what this build cannot run.
DecoderOptions decoder_options(const ExecutionOptions& execution, Recompute recompute,
                               DeviceKind device);

class Job {
 public:
  /// Opens the checkpoint and lays the model out. Weights are read by `load`.
  Job(World& world, const std::string& model_directory, const ExecutionOptions& execution,
      Recompute recompute, const std::string& all_options);
  /// A model without files, whose weights come from a source of the caller's.
  Job(World& world, const ModelConfig& config, const ExecutionOptions& execution,
      Recompute recompute, const std::string& all_options);

  void load() { model_->load(checkpoint()); }
  void load(UnitSource& source) { model_->load(source); }

  World& world() { return world_; }
  const Mesh& mesh() const { return mesh_; }
  int data_rank() const { return mesh_.data_rank(world_.rank()); }
  int data_size() const { return mesh_.data_parallel(); }
  const Checkpoint& checkpoint() const { return checkpoint_.value(); }
  const ModelConfig& config() const { return model_->config(); }
  Arena& arena() { return arena_; }
  Context& context() { return ctx_; }
  DecoderModel& model() { return *model_; }
  Communicator& gather_group() { return *gather_; }
  Communicator& reduce_group() { return *reduce_; }
  /// Null with one tensor-parallel rank.
  TensorParallel* tensor_parallel() { return tensor_parallel_ ? &*tensor_parallel_ : nullptr; }
  TensorParallelGroups tensor_parallel_groups();
  /// Micro-batches have a multiple of so many tokens.
  int64_t pad_multiple() const { return mesh_.tp; }

  /// Received by this rank over all of the job's communicators, since they were made.
  int64_t wire_bytes() const;

  /// Sum over the data-parallel ranks of one f64 on the device, read on the host.
  double reduce_sum(const View& value);
  /// A vector of f32 on the device, laid out as the adapters', put together from all
  /// tensor-parallel ranks: the same full vector on each of them. Collective over them.
  std::vector<float> full_vector(const AdapterSet& adapters, const ConstView& flat);

 private:
  void lay_out(const ModelConfig& config, const ExecutionOptions& execution, Recompute recompute,
               const std::string& all_options);

  World& world_;
  std::optional<Checkpoint> checkpoint_;
  Mesh mesh_;
  Arena arena_;
  Stream stream_;
  Context ctx_;
  std::unique_ptr<Communicator> gather_;    // units, over dp_shard
  std::unique_ptr<Communicator> regather_;  // units after forward, over a smaller group; or null
  std::unique_ptr<Communicator> reduce_;    // gradients, over dp_replicate x dp_shard
  // With several tensor-parallel ranks:
  std::unique_ptr<Communicator> tp_;       // activations
  std::unique_ptr<Communicator> tp_host_;  // adapters to be saved
  std::unique_ptr<Communicator> kv_;       // those with the same KV heads; or null
  std::unique_ptr<Stream> tp_stream_;
  std::optional<TensorParallel> tensor_parallel_;
  std::unique_ptr<DecoderModel> model_;
};

}  // namespace rowshard
