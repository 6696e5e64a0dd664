// Measurements behind `rowshard bench attention`: plain numbers, no printing. Medians of events
// around one call, random operands, both ways in the same run.
#pragma once

#include <string>
#include <vector>

#include "core/arena.h"

namespace rowshard {

struct AttentionMeasurement {
  std::string packing;  // "1 x 4096", "packed 4096"
  int64_t tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
  double forward_us = 0, backward_us = 0;          // as layers call it
  double host_us = 0;                              // of the calling thread, forward and backward
  double own_forward_us = 0, own_backward_us = 0;  // our own kernels; 0 on the host
  int64_t scratch_bytes = 0;                       // of the backward
};
/// The attention of Llama-3.1-8B (32 heads of 128, 8 key heads, causal) in bf16.
std::vector<AttentionMeasurement> bench_attention(int repeats, Context& ctx);

}  // namespace rowshard
