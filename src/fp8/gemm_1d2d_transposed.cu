#include "fp8/gemm_1d2d_launch.cuh"

namespace rowshard::cuda {

void gemm_1d2d_transposed(const Gemm1d2d& g, int tile, int multiprocessors, cudaStream_t stream) {
  launch_gemm_1d2d<true>(g, tile, multiprocessors, stream);
}

}  // namespace rowshard::cuda
