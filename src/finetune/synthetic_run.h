// Training of a model without files: random weights, adapters and tokens, the same at any number of
// ranks. What `bench step` measures and `validate` checks.
#pragma once

#include "finetune/step_graphs.h"
#include "shard/sharded_unit.h"

namespace rowshard {

/// Random weights of any unit: codes without NaN, scales that keep activations near 1.
class RandomSource : public UnitSource {
 public:
  void read(const WeightSpec& weight, int64_t begin, int64_t end, std::byte* to) override;
  void scales(const WeightSpec& weight, float* to) override;
};

struct SyntheticOptions {
  ModelConfig model;  // sizes only; max_position_embeddings is made to fit
  ExecutionOptions execution;
  LoraOptions lora;
  Recompute recompute = Recompute::kNone;
  int64_t tokens = 4096;   // of a micro-batch, one sequence
  int64_t grad_accum = 1;  // micro-batches of a rank in a step
  bool cuda_graph = false;
};
std::string to_text(const SyntheticOptions& options);
/// The same run as `rowshard plan` takes it.
FinetuneOptions plan_options(const SyntheticOptions& options);

class SyntheticRun {
 public:
  /// Collective. Micro-batch k of data rank r is number k · ranks + r of the run's batches, so that
  /// one rank with more micro-batches sees what several see.
  SyntheticRun(World& world, const SyntheticOptions& options);

  struct Step {
    double loss = 0, grad_norm = 0;
    bool operator==(const Step&) const = default;
  };
  /// `follows`: kStep when another step comes next. A replayed step leaves nothing for it.
  Step step(double lr, Follows follows = Follows::kNothing);
  /// Whether steps replay recorded graphs; only with options().cuda_graph, and then at first.
  void use_graphs(bool use) { use_graphs_ = use; }
  /// Mean loss of the step's batches, without training.
  double evaluate();
  /// Logits of the last token of the first batch, so that the model has been in inference.
  std::vector<float> logits();
  /// A step that fails in the middle of its plan.
  void interrupted_step();

  /// The full vector, the same at any number of ranks.
  std::vector<float> parameters();

  const SyntheticOptions& options() const { return options_; }
  Job& job() { return job_; }
  AdapterSet& adapters() { return adapters_; }
  AdapterOptimizer& optimizer() { return optimizer_; }
  int64_t steps() const { return steps_; }

 private:
  SyntheticOptions options_;
  Job job_;
  AdapterSet adapters_;
  AdapterOptimizer optimizer_;
  Tensor loss_sum_;  // [1] f64
  std::vector<MicroBatch> hosts_;
  std::vector<std::unique_ptr<DeviceBatch>> batches_;
  std::optional<StepGraphs> graphs_;
  bool use_graphs_ = true;
  int64_t steps_ = 0;
};

}  // namespace rowshard
