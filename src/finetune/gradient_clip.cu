#include "finetune/gradient_clip.h"

#include <algorithm>

#include "core/cuda_check.h"
#include "finetune/gradient_clip_factor.h"

namespace rowshard::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 512;

// The sum of one value a thread, in thread 0.
__device__ double block_sum(double value) {
  __shared__ double warps[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % 32 == 0)
    warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kThreads / 32; ++warp)
      sum += warps[warp];
  }
  return sum;
}

__global__ void partial_kernel(double* partial, const float* x, int64_t n) {
  double sum = 0;
  const int64_t stride = int64_t{kThreads} * gridDim.x;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += stride) {
    sum += double{x[i]} * x[i];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0)
    partial[blockIdx.x] = sum;
}

__global__ void total_kernel(float* squares, const double* partial, int count, bool accumulate) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads)
    sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0)
    *squares = static_cast<float>((accumulate ? *squares : 0.0) + sum);
}

__global__ void scale_kernel(float* result, const float* squares, const float* tokens,
                             float clip_norm) {
  const ClipResult clip = clip_factor(*squares, *tokens, clip_norm);
  result[0] = clip.factor;
  result[1] = clip.norm;
}

}  // namespace

void sum_of_squares(const View& squares, const ConstView& x, bool accumulate, Context& ctx) {
  const int64_t n = x.elements();
  const int blocks = static_cast<int>(std::min<int64_t>(ceil_div(n, kThreads * 8), kMaxBlocks));
  Tensor partial = ctx.arena.tensor(Category::kWorkspace, "gradient_clip.partial", DType::kF64,
                                    {std::max(blocks, 1)});
  if (blocks > 0) {
    partial_kernel<<<blocks, kThreads, 0, native(ctx.stream)>>>(partial.as<double>(), x.as<float>(),
                                                                n);
    CUDA_CHECK_LAUNCH("sum_of_squares, partial");
  }
  total_kernel<<<1, kThreads, 0, native(ctx.stream)>>>(squares.as<float>(), partial.as<double>(),
                                                       blocks, accumulate);
  CUDA_CHECK_LAUNCH("sum_of_squares, total");
}

void gradient_scale(const View& result, const ConstView& squares, const ConstView& tokens,
                    float clip_norm, Context& ctx) {
  scale_kernel<<<1, 1, 0, native(ctx.stream)>>>(result.as<float>(), squares.as<float>(),
                                                tokens.as<float>(), clip_norm);
  CUDA_CHECK_LAUNCH("gradient_scale");
}

}  // namespace rowshard::cuda
