// A f32, f16 or bf16 Hugging Face checkpoint made into a native block-FP8 one.
//
// The linear weights of the decoder layers become e4m3 codes and f32 scales per 128x128 block, as
// Hugging Face's fine-grained FP8 reads them (X.weight, X.weight_scale_inv, quantization_config);
// embeddings, head, norms and biases keep their bytes. One weight is in memory at a time. The
// output directory appears as a whole or not at all; other files (tokenizer, generation config) are
// copied.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace rowshard {

struct QuantizeCheckpointOptions {
  int64_t max_shard_bytes = int64_t{5} << 30;
  /// On, the codes and scales are those that training from the bf16 checkpoint makes in memory.
  /// Off, the scale is amax / 448 as Hugging Face's own converter writes.
  bool power_of_two_scales = true;
};

struct CheckpointSummary {
  int64_t converted = 0;  // tensors quantised, or merged
  int64_t kept = 0;       // tensors copied as they were
  int64_t bytes_in = 0;
  int64_t bytes_out = 0;
  int files = 0;
};

/// ConfigError when the source is FP8 already, has weights that are not finite, or the output
/// exists.
CheckpointSummary quantize_checkpoint(const std::filesystem::path& source,
                                      const std::filesystem::path& destination,
                                      const QuantizeCheckpointOptions& options = {});

}  // namespace rowshard
