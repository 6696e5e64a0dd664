// `rowshard bench stack`: what releasing the columnwise copies of frozen FP8 weights saves and
// costs.
//
// A stack of frozen square linear layers runs forward and backward under both policies, with
// weights that start with the rowwise copy alone and with both. Each stack has its own arena, so
// its bytes are its own; the stacks are timed in turns within one run. All of them must give the
// same bits.
//
// A step: x is quantised and multiplied, layer by layer, into new memory, nothing is saved; then
// the gradient goes back through the layers in place. Its highest point is in the forward under
// either policy, so the peaks differ by as much as the steady states do.
#pragma once

#include <string>
#include <vector>

#include "core/arena.h"
#include "layers/columnwise_policy.h"

namespace rowshard {

struct StackBenchOptions {
  int layers = 16;
  int64_t features = 4096;
  int64_t tokens = 4096;
  int repeats = 31;    // timed; the median counts
  int steps = 4;       // in one timed repeat
  bool graph = false;  // replay each stack's step as one CUDA graph
};
/// ConfigError with the option's name.
void check(const StackBenchOptions& options);

struct StackMeasurement {
  ColumnwisePolicy policy = ColumnwisePolicy::kRelease;
  bool both_at_start = false;  // the weights were made with both copies
  double step_ms = 0, fastest_ms = 0;
  CategoryBytes total, columnwise, scales;  // steady: between steps; peak: within a step
};
struct StackDifference {
  bool both_at_start = false;
  double time = 0;  // release / resident − 1, of the medians
  // resident − release
  int64_t steady = 0, peak = 0;  // of all categories
  int64_t codes = 0;             // of it, steady columnwise codes; the rest is their scales
};
struct StackBenchResult {
  std::vector<StackMeasurement> stacks;
  std::vector<StackDifference> differences;
};
/// LogicError when the stacks do not give the same bits.
StackBenchResult bench_stack(const StackBenchOptions& options, Device device);

}  // namespace rowshard
