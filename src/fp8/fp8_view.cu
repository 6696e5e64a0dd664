#include "core/cuda_check.h"
#include "fp8/fp8_view.h"

namespace rowshard::cuda {
namespace {

constexpr int kThreads = 256;

// One thread an element of the result. `transposed`: the GEMM layout of 1×128 is.
__global__ void gemm_scales_kernel(float* to, const float* from, int64_t rows, int64_t stride,
                                   int64_t valid, int64_t compact_cols, bool transposed) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < rows * stride) {
    const int64_t r = i / stride, c = i % stride;
    to[i] = c >= valid ? 1.0f : from[transposed ? c * compact_cols + r : r * compact_cols + c];
  }
}
__global__ void compact_scales_kernel(float* to, const float* from, int64_t rows, int64_t cols,
                                      int64_t stride, bool transposed) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < rows * cols) {
    const int64_t r = i / cols, c = i % cols;
    to[i] = from[transposed ? c * stride + r : r * stride + c];
  }
}

}  // namespace

void gemm_scales(const View& gemm, const ConstView& compact, Grouping grouping, Stream& stream) {
  const bool transposed = grouping == Grouping::k1x128;
  const int64_t valid = transposed ? compact.dim(0) : compact.dim(1);
  gemm_scales_kernel<<<ceil_div(gemm.elements(), kThreads), kThreads, 0, native(stream)>>>(
      gemm.as<float>(), compact.as<float>(), gemm.dim(0), gemm.dim(1), valid, compact.dim(1),
      transposed);
  CUDA_CHECK_LAUNCH("gemm_scales");
}

void compact_scales(const View& compact, const ConstView& gemm, Grouping grouping, Stream& stream) {
  compact_scales_kernel<<<ceil_div(compact.elements(), kThreads), kThreads, 0, native(stream)>>>(
      compact.as<float>(), gemm.as<float>(), compact.dim(0), compact.dim(1), gemm.dim(1),
      grouping == Grouping::k1x128);
  CUDA_CHECK_LAUNCH("compact_scales");
}

}  // namespace rowshard::cuda
