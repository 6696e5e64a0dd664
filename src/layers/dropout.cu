#include "layers/dispatch.h"
#include "layers/kernel.cuh"
#include "layers/lora.h"
#include "layers/mask_runs.h"

namespace rowshard::cuda {
namespace {

// A thread takes the four neighbouring elements that one call of the generator serves.
template <typename T>
__global__ void dropout_kernel(T* y, const T* x, Dropout dropout, MaskRuns runs, float keep) {
  const Philox random = dropout.philox();
  const int64_t stride = int64_t{blockDim.x} * gridDim.x, items = runs.count * runs.groups;
  for (int64_t item = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; item < items;
       item += stride) {
    const int64_t run = runs.count == 1 ? 0 : item / runs.groups;
    const int64_t first = runs.first + run * runs.stride;
    const int64_t group = first / 4 + (item - run * runs.groups);
    const auto words = random.words(group);
    for (int lane = 0; lane < 4; ++lane) {
      const int64_t i = group * 4 + lane - first;
      if (i < 0 || i >= runs.length)
        continue;
      const float uniform = static_cast<float>(words[lane] >> 8) * 0x1p-24f;
      const int64_t at = run * runs.length + i;
      y[at] = uniform < dropout.rate ? T{} : narrow<T>(widen(x[at]) * keep);
    }
  }
}

}  // namespace

void apply_dropout(const View& y, const ConstView& x, const Dropout& dropout, Stream& stream) {
  for_cuda_type(x.dtype, "apply_dropout", [&](auto type) {
    using T = decltype(type);
    const MaskRuns runs(x, dropout);
    dropout_kernel<<<grid_for(runs.count * runs.groups), kThreads, 0, native(stream)>>>(
        y.as<T>(), x.as<T>(), dropout, runs, 1 / (1 - dropout.rate));
  });
  CUDA_CHECK_LAUNCH("apply_dropout");
}

}  // namespace rowshard::cuda
