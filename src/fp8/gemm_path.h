// Which product runs on a GPU, for the sources of this room: decided by compute capability,
// groupings and sizes alone, so that the plan device and the tests can ask.
#pragma once

#include "fp8/fp8_view.h"

namespace rowshard {

enum class GemmPath {
  kBlockScaled,  // cuBLASLt's 1×128 and 128×128 product of Hopper
  kMx,           // cuBLASLt's MX product, compute capability 10 and above
  kWidened,      // both operands as bf16
};
const char* to_string(GemmPath path);

struct GemmChoice {
  GemmPath path = GemmPath::kWidened;
  const char* reason = "";  // of a widened product, for the log
  bool operator==(const GemmChoice&) const = default;
};

/// capability: compute capability × 10. y = x·wᵀ [M, N] contracts over K.
GemmChoice choose_gemm(int capability, Grouping x, Grouping w, int64_t n, int64_t k);

}  // namespace rowshard
