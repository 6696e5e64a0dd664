// `rowshard bench step`: what a training step of a model shape costs on these ranks, and how much
// of its communication shows. Weights and data are random; no file is read.
//
// The step is the trainer's: gathers, forward, backward, the reduction of adapter gradients, clip
// and AdamW (with a learning rate of 0, so that every step of every mode must give the same bits,
// which is checked). The mode asked for and `resident`, which gathers nothing during a step, are
// measured in turns; what they differ by is what the gathers cost, hidden or not.
#pragma once

#include <optional>

#include "finetune/synthetic_run.h"

namespace rowshard {

struct StepBenchOptions : SyntheticOptions {
  int steps = 10;        // timed, of each mode, in two turns
  bool baseline = true;  // measure resident too, and with graphs the same without them
  std::string trace;     // of one step more, in the mode asked for; empty: none
};
/// Llama-3.1-8B's sizes.
StepBenchOptions default_step_bench();
void check(const StepBenchOptions& options);

/// Medians over the steps, each step the slowest rank's; bytes are this rank's.
struct StepMeasurement {
  std::string mode;
  double step_ms = 0;
  double wait_ms = 0;            // compute stood waiting for gathers
  double tp_wait_ms = 0;         // … for activations of other tensor-parallel ranks
  double reduction_ms = 0;       // the collectives of the optimiser
  double tokens_per_second = 0;  // of all ranks
  int64_t wire_bytes = 0;
  int64_t peak_bytes = 0;
  double loss = 0, grad_norm = 0;  // the same bits in every step
};
struct StepBenchResult {
  /// The one asked for, then resident; with graphs also the one asked for without them; with
  /// several tensor-parallel ranks also the one asked for with every transfer of activations waited
  /// for at once.
  std::vector<StepMeasurement> modes;
  /// (step of the mode - step of resident + reduction) / step of the mode; only with both.
  std::optional<double> not_hidden;
};
StepBenchResult bench_step(World& world, const StepBenchOptions& options);

}  // namespace rowshard
