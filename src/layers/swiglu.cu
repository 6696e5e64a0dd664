#include "layers/dispatch.h"
#include "layers/kernel.cuh"
#include "layers/swiglu.h"

namespace rowshard::cuda {
namespace {

template <typename T, int kWidth>
__global__ void forward_kernel(T* y, const T* gate, const T* up, int64_t count) {
  const int64_t stride = int64_t{blockDim.x} * gridDim.x * kWidth;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kWidth; i < count;
       i += stride) {
    const auto g = load<kWidth>(gate + i);
    const auto u = load<kWidth>(up + i);
    Pack<T, kWidth> out;
    for (int e = 0; e < kWidth; ++e) {
      const float value = widen(g.values[e]);
      out.values[e] = narrow<T>(value / (1 + expf(-value)) * widen(u.values[e]));
    }
    store(y + i, out);
  }
}

template <typename T, int kWidth>
__global__ void backward_kernel(T* dgate, T* dup, const T* dy, const T* gate, const T* up,
                                int64_t count) {
  const int64_t stride = int64_t{blockDim.x} * gridDim.x * kWidth;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kWidth; i < count;
       i += stride) {
    const auto g = load<kWidth>(gate + i);
    const auto u = load<kWidth>(up + i);
    const auto grad = load<kWidth>(dy + i);
    Pack<T, kWidth> dg, du;
    for (int e = 0; e < kWidth; ++e) {
      const float value = widen(g.values[e]), factor = widen(u.values[e]);
      const float d = widen(grad.values[e]);
      const float s = 1 / (1 + expf(-value));
      dg.values[e] = narrow<T>(d * factor * s * (1 + value * (1 - s)));
      du.values[e] = narrow<T>(d * (value * s));
    }
    store(dgate + i, dg);
    store(dup + i, du);
  }
}

}  // namespace

void swiglu(const View& y, const ConstView& gate, const ConstView& up, Stream& stream) {
  for_cuda_type(y.dtype, "swiglu", [&](auto type) {
    using T = decltype(type);
    const int64_t count = y.elements();
    const auto launch = [&]<int kWidth>() {
      forward_kernel<T, kWidth><<<grid_for(count / kWidth), kThreads, 0, native(stream)>>>(
          y.as<T>(), gate.as<T>(), up.as<T>(), count);
    };
    wide<T>(count, {y.data, gate.data, up.data}) ? launch.template operator()<kWide<T>>()
                                                 : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("swiglu");
}

void swiglu_backward(const View& dgate, const View& dup, const ConstView& dy, const ConstView& gate,
                     const ConstView& up, Stream& stream) {
  for_cuda_type(dy.dtype, "swiglu_backward", [&](auto type) {
    using T = decltype(type);
    const int64_t count = dy.elements();
    const auto launch = [&]<int kWidth>() {
      backward_kernel<T, kWidth><<<grid_for(count / kWidth), kThreads, 0, native(stream)>>>(
          dgate.as<T>(), dup.as<T>(), dy.as<T>(), gate.as<T>(), up.as<T>(), count);
    };
    wide<T>(count, {dgate.data, dup.data, dy.data, gate.data, up.data})
        ? launch.template operator()<kWide<T>>()
        : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("swiglu_backward");
}

}  // namespace rowshard::cuda
