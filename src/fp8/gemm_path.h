// Which product runs on a GPU, for the sources of this room: decided by compute capability,
// groupings and sizes alone, so that the plan device and the tests can ask.
#pragma once

#include "fp8/gemm.h"

namespace rowshard {

enum class GemmPath {
  kBlockScaled,  // Hopper's 1×128 and 128×128 product: cuBLASLt's, or our own for some
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

/// Whether our own kernel can compute a product whose path is kBlockScaled, and whether it does.
bool own_gemm_runs(DType y, const ConstFp8View& x, const ConstFp8View& w);
bool own_gemm_chosen(GemmBackend backend, DType y, const ConstFp8View& x, const ConstFp8View& w);

/// Of a device that has `all`, as set_gemm_multiprocessors bounds them.
inline int product_multiprocessors(int all) {
  const int bound = gemm_multiprocessors();
  return bound > 0 && bound < all ? bound : all;
}

}  // namespace rowshard
