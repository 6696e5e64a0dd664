#include "fp8/gemm_1d2d_launch.cuh"

namespace rowshard::cuda {

void gemm_1d2d(const Gemm1d2d& g, int multiprocessors, void* stream, int tile) {
  if (g.m == 0 || g.n == 0) {
    return;
  }
  const auto queue = static_cast<cudaStream_t>(stream);
  if (tile < 0) {
    tile = choose_gemm_1d2d_tile(g.m, g.n, g.k, multiprocessors, g.transpose_w);
  }
  g.transpose_w ? gemm_1d2d_transposed(g, tile, multiprocessors, queue)
                : launch_gemm_1d2d<false>(g, tile, multiprocessors, queue);
}

}  // namespace rowshard::cuda
