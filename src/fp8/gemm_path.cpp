#include "fp8/gemm_path.h"

namespace rowshard {

const char* to_string(GemmPath path) {
  switch (path) {
    case GemmPath::kBlockScaled:
      return "block-scaled";
    case GemmPath::kMx:
      return "mx";
    case GemmPath::kWidened:
      return "widened";
  }
  return "?";
}

GemmChoice choose_gemm(int capability, Grouping x, Grouping w, int64_t n, int64_t k) {
  if (is_mx(x)) {
    if (capability < 100)
      return {GemmPath::kWidened, "MX products need compute capability 10"};
    if (k % 32 != 0 || n % 8 != 0)
      return {GemmPath::kWidened, "MX products need K % 32 = 0 and N % 8 = 0"};
    return {GemmPath::kMx};
  }
  if (x == Grouping::k128x128 && w == Grouping::k128x128)
    return {GemmPath::kWidened, "cuBLASLt has no product of 128x128 by 128x128"};
  if (capability != 90)
    return {GemmPath::kWidened, "cuBLASLt has products with f32 block scales on Hopper only"};
  return {GemmPath::kBlockScaled};
}

}  // namespace rowshard
