// What a job will hold on each rank, before it runs: one step of it is run on the plan device,
// which counts every allocation and computes nothing.
//
// The counts are exact where the step allocates through the arena with sizes that depend on shapes
// only, which is everything but the device libraries' own memory. Ranks differ only by what their
// micro-batches hold; the plan takes the largest.
#pragma once

#include <array>
#include <string>

#include "finetune/options.h"
#include "model/decoder_model.h"

namespace rowshard {

struct CategoryPlan {
  int64_t steady = 0;  // between steps
  int64_t peak = 0;    // highest during a step
};

/// The FP8 products of the weights of one shape at the largest micro-batch, on Hopper.
struct ProductPlan {
  int64_t n = 0, k = 0;
  int weights = 0;
  std::string fprop, dgrad;  // "own", "cublaslt"; "rebuild, own", "direct"
};

struct MemoryPlan {
  int ranks = 1;
  int64_t tokens = 0;           // of the largest micro-batch
  int64_t trainable = 0;        // adapter parameters
  int64_t base_parameters = 0;  // of all ranks together
  std::array<CategoryPlan, kCategoryCount> categories;
  CategoryPlan total;
  int64_t wire_bytes = 0;  // received by a rank in one optimiser step
  UsagePlan usage;         // of training
  std::vector<UnitLayout> units;
  std::vector<ProductPlan> products;  // none on the host
};

/// `device` is where the job would run. Reads the model's config.json only, and the token file if
/// options.data names one; without it every micro-batch is full and every token has a label.
MemoryPlan plan_memory(const FinetuneOptions& options, DeviceKind device);
/// The same of a model without files; options.model is not looked at.
MemoryPlan plan_memory(const ModelConfig& config, const FinetuneOptions& options,
                       DeviceKind device);

std::string to_table(const MemoryPlan& plan, bool with_usage);
std::string to_json(const MemoryPlan& plan);

}  // namespace rowshard
