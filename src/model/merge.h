// Base + adapter -> a plain bf16 Hugging Face model.
//
// W' = bf16(W + scale x B A), with W dequantised to f32 when the base is FP8 and the sum in f32.
// quantization_config is stripped, since nothing is FP8 any more: a merge back into FP8 would round
// away most of a typical update. One weight is in memory at a time; the directory appears as a
// whole.
#pragma once

#include <filesystem>

#include "model/quantize_checkpoint.h"

namespace rowshard {

struct MergeOptions {
  int64_t max_shard_bytes = int64_t{5} << 30;
};

struct MergeSummary : CheckpointSummary {
  /// How much of the update survived the rounding to bf16: <W' - W, d> / <d, d> over all merged
  /// weights, d = scale x B A. 1 is all; far below 1, the update is too small for bf16.
  double update_kept = 1;
};

/// ConfigError when the adapter has a module that the base has not, or shapes differ.
MergeSummary merge_checkpoint(const std::filesystem::path& base,
                              const std::filesystem::path& adapter,
                              const std::filesystem::path& destination,
                              const MergeOptions& options = {});

}  // namespace rowshard
