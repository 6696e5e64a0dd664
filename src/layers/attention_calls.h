// How a micro-batch is cut into calls of cuDNN's attention, for the sources of this room only.
#pragma once

#include <span>
#include <vector>

#include "layers/attention_scratch.h"

namespace rowshard::cuda {

/// Segments [first, first + count), each at most `length` long, kv_heads key heads at a time. A
/// ragged call counts in descending order of length, and its last segments may be empty.
struct AttentionCall {
  int64_t first, count, length, kv_heads;
  bool dense;  // equal segments of whole tiles, as they lie
};

/// One call: the forward keeps nothing. `lengths` of the segments, in descending order.
std::vector<AttentionCall> forward_calls(std::span<const int32_t> lengths, int64_t kv_heads);

/// As many segments a call as their scores fit for (score_limit); counts of ragged calls are powers
/// of two. A segment whose scores do not fit alone is cut by key heads.
std::vector<AttentionCall> backward_calls(std::span<const int32_t> lengths, int64_t heads,
                                          int64_t kv_heads);

}  // namespace rowshard::cuda
