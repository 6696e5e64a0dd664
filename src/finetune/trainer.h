// The training loop: micro-batches, one reduction of adapter gradients, clip, AdamW, evaluation,
// checkpoints.
//
// The loss is Σ over tokens of all ranks and micro-batches, divided by the number of trained tokens
// of the global batch: the same number at any split of the same batch.
#pragma once

#include "finetune/adapter_optimizer.h"
#include "finetune/batches.h"
#include "finetune/job.h"
#include "finetune/schedule.h"
#include "finetune/step_graphs.h"
#include "finetune/token_file.h"

namespace rowshard {

BatchOptions batch_options(const FinetuneOptions& options, int data_ranks, int64_t seq_len);
AdapterConfig adapter_config(const FinetuneOptions& options);

class Trainer {
 public:
  Trainer(Job& job, const FinetuneOptions& options, const TokenFile& data);

  int64_t max_steps() const { return max_steps_; }
  int64_t step() const { return step_; }  // steps done
  AdapterSet& adapters() { return *adapters_; }
  const Batches& batches() const { return batches_; }
  const StepGraphs* graphs() const { return graphs_ ? &*graphs_ : nullptr; }  // with cuda_graph

  /// One optimiser step. `follows`: kStep when another one comes next, whose first gathers then
  /// begin before this one's update.
  StepMetrics train_step(Follows follows = Follows::kNothing);
  /// Mean loss over every sample of the file.
  EvalMetrics evaluate(const EvalBatches& batches);

  /// Adapter, moments, step and data position, in `directory` as a whole. Collective; rank 0
  /// writes.
  void save(const std::filesystem::path& directory);
  /// Continues from what `save` wrote, at any number of ranks.
  void resume(const std::filesystem::path& directory);
  /// Rank 0 writes. Collective over the tensor-parallel ranks, if there are several.
  void save_adapter(const std::filesystem::path& directory);

 private:
  Job& job_;
  FinetuneOptions options_;
  Batches batches_;
  int64_t max_steps_;
  Schedule schedule_;
  std::unique_ptr<AdapterSet> adapters_;
  std::unique_ptr<AdapterOptimizer> optimizer_;
  DataPosition position_;
  int64_t step_ = 0;
  Tensor loss_sum_;  // [1] f64
  std::optional<StepGraphs> graphs_;
};

/// `rowshard finetune`: the whole job. Writes metrics.jsonl, adapter/ and checkpoints under
/// options.output_dir.
void run_finetune(World& world, const FinetuneOptions& options, Reporter& reporter);

/// `rowshard evaluate`.
EvalMetrics run_evaluate(World& world, const EvaluateOptions& options, Reporter& reporter);

}  // namespace rowshard
