#include "layers/dispatch.h"
#include "layers/kernel.cuh"
#include "layers/lora.h"

namespace rowshard::cuda {
namespace {

// A thread takes the four neighbouring elements that one call of the generator serves.
template <typename T>
__global__ void dropout_kernel(T* y, const T* x, Philox random, int64_t first, int64_t count,
                               int64_t begin, int64_t groups, float rate, float keep) {
  const int64_t stride = int64_t{blockDim.x} * gridDim.x;
  for (int64_t g = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; g < groups; g += stride) {
    const auto words = random.words(begin + g);
    for (int lane = 0; lane < 4; ++lane) {
      const int64_t i = (begin + g) * 4 + lane - first;
      if (i < 0 || i >= count)
        continue;
      const float uniform = static_cast<float>(words[lane] >> 8) * 0x1p-24f;
      y[i] = uniform < rate ? T{} : narrow<T>(widen(x[i]) * keep);
    }
  }
}

}  // namespace

void apply_dropout(const View& y, const ConstView& x, const Dropout& dropout, Stream& stream) {
  for_cuda_type(x.dtype, "apply_dropout", [&](auto type) {
    using T = decltype(type);
    const int64_t count = x.elements(), first = dropout.first_token * x.dim(1);
    const int64_t begin = first / 4, groups = ceil_div(first + count, 4) - begin;
    dropout_kernel<<<grid_for(groups), kThreads, 0, native(stream)>>>(
        y.as<T>(), x.as<T>(), dropout.random, first, count, begin, groups, dropout.rate,
        1 / (1 - dropout.rate));
  });
  CUDA_CHECK_LAUNCH("apply_dropout");
}

}  // namespace rowshard::cuda
