#include "layers/dispatch.h"
#include "layers/kernel.cuh"
#include "layers/rope.h"

namespace rowshard::cuda {
namespace {

// A thread turns kWidth neighbouring pairs of one head.
template <typename T, int kWidth>
__global__ void rope_kernel(T* x, const int32_t* positions, const float* cosines,
                            const float* sines, int64_t packs, int64_t heads, int64_t half,
                            float sign) {
  const int64_t per_head = half / kWidth;
  const int64_t stride = int64_t{blockDim.x} * gridDim.x;
  for (int64_t p = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; p < packs; p += stride) {
    const int64_t i = p % per_head * kWidth;
    const int64_t row = p / per_head;  // token · heads + head
    const int64_t at = int64_t{positions[row / heads]} * half + i;
    T* low = x + row * 2 * half + i;
    T* high = low + half;
    auto a = load<kWidth>(low);
    auto b = load<kWidth>(high);
    for (int e = 0; e < kWidth; ++e) {
      const float cosine = cosines[at + e], sine = sign * sines[at + e];
      const float left = widen(a.values[e]), right = widen(b.values[e]);
      a.values[e] = narrow<T>(left * cosine - right * sine);
      b.values[e] = narrow<T>(right * cosine + left * sine);
    }
    store(low, a);
    store(high, b);
  }
}

}  // namespace

void rope(const View& x, const ConstView& positions, const RopeTable& table,
          RopeDirection direction, Stream& stream) {
  const float sign = direction == RopeDirection::kForward ? 1.0f : -1.0f;
  for_cuda_type(x.dtype, "rope", [&](auto type) {
    using T = decltype(type);
    const int64_t heads = x.dim(1), half = x.dim(2) / 2;
    const auto launch = [&]<int kWidth>() {
      const int64_t packs = x.dim(0) * heads * half / kWidth;
      rope_kernel<T, kWidth><<<grid_for(packs), kThreads, 0, native(stream)>>>(
          x.as<T>(), positions.as<int32_t>(), table.cos.as<float>(), table.sin.as<float>(), packs,
          heads, half, sign);
    };
    wide<T>(half, {x.data}) ? launch.template operator()<kWide<T>>()
                            : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("rope");
}

}  // namespace rowshard::cuda
