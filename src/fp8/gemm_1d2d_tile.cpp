#include <limits>

#include "core/view.h"
#include "fp8/gemm_1d2d.h"

namespace rowshard::cuda {
namespace {

// Microseconds of one round of tiles on an H200 at its power limit: for each 128 of K, and once.
// From bench/results/own-gemm-h200-2026-12-01.log.
struct TileCost {
  double per_block, once;
};
constexpr TileCost kCosts[kGemm1d2dTileCount] = {
    {0.870, 1.0}, {0.475, 0.7}, {0.666, 0.9}, {0.300, 0.6}, {0.225, 0.5}};

}  // namespace

int choose_gemm_1d2d_tile(int64_t m, int64_t n, int64_t k, int multiprocessors, bool transpose_w) {
  double best = std::numeric_limits<double>::infinity();
  int chosen = 0;
  for (int i = 0; i < kGemm1d2dTileCount; ++i) {
    const int64_t tiles = ceil_div(m, kGemm1d2dTiles[i].rows) * ceil_div(n, kGemm1d2dTiles[i].cols);
    const double round =
        static_cast<double>(ceil_div(k, 128)) * kCosts[i].per_block + kCosts[i].once;
    const double cost = static_cast<double>(ceil_div(tiles, multiprocessors)) * round;
    if (cost < best && gemm_1d2d_has(i, transpose_w)) {
      best = cost;
      chosen = i;
    }
  }
  return chosen;
}

}  // namespace rowshard::cuda
