#include "layers/activation_element.h"
#include "layers/dispatch.h"
#include "layers/row_pack.cuh"

namespace rowshard::cuda {
namespace {

struct Exp {
  __device__ float operator()(float x) const { return expf(x); }
};

// A warp takes kWarpElements of one row, so that whole groups of 128 are in one warp. Both loops
// are uniform over a warp.
template <Activation kActivation, typename T>
__global__ void forward_kernel(T* y, RowCodes y8, const T* gate, const T* up, int64_t rows,
                               int64_t width, bool vector) {
  using Element = ActivationElement<kActivation, float, Exp>;
  const int64_t chunks = (width + kWarpElements<T> - 1) / kWarpElements<T>;
  const int64_t warps = gridDim.x * int64_t{blockDim.x} / 32;
  for (int64_t item = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32; item < rows * chunks;
       item += warps) {
    const int64_t row = item / chunks;
    const int64_t column = item % chunks * kWarpElements<T> + threadIdx.x % 32 * kWide<T>;
    const int64_t valid = width - column, at = row * width + column;
    const auto g = load_row(gate + at, valid, vector);
    RowPack<T> u, out;
    if constexpr (is_gated(kActivation))
      u = load_row(up + at, valid, vector);
    for (int e = 0; e < kWide<T>; ++e) {
      float value = Element::forward(widen(g.values[e]));
      if constexpr (is_gated(kActivation))
        value *= widen(u.values[e]);
      out.values[e] = narrow<T>(value);  // 0 beyond the row
    }
    if (y && valid > 0)
      store_row(y + at, out, valid, vector);
    if (y8.codes)
      quantize_pack<T>(y8, row, column, out);
  }
}

template <Activation kActivation, typename T>
__global__ void backward_kernel(T* dgate, T* dup, const T* dy, const T* gate, const T* up,
                                int64_t count, bool vector) {
  using Element = ActivationElement<kActivation, float, Exp>;
  const int64_t stride = int64_t{blockDim.x} * gridDim.x * kWide<T>;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kWide<T>; i < count;
       i += stride) {
    const int64_t valid = count - i;
    const auto g = load_row(gate + i, valid, vector);
    const auto grad = load_row(dy + i, valid, vector);
    RowPack<T> u, dg, du;
    if constexpr (is_gated(kActivation))
      u = load_row(up + i, valid, vector);
    for (int e = 0; e < kWide<T>; ++e) {
      const float d = widen(grad.values[e]);
      float s, tail;
      const float value = Element::backward(widen(g.values[e]), s, tail);
      if constexpr (is_gated(kActivation)) {
        dg.values[e] = narrow<T>(d * widen(u.values[e]) * s * tail);
        du.values[e] = narrow<T>(d * value);
      } else {
        dg.values[e] = narrow<T>(d * s * tail);
      }
    }
    store_row(dgate + i, dg, valid, vector);
    if constexpr (is_gated(kActivation))
      store_row(dup + i, du, valid, vector);
  }
}

/// f.template operator()<kActivation, T>().
template <typename F>
void for_kernel(Activation activation, DType dtype, F&& f) {
  for_cuda_type(dtype, to_string(activation), [&](auto type) {
    using T = decltype(type);
    switch (activation) {
      case Activation::kSwiGlu:
        return f.template operator()<Activation::kSwiGlu, T>();
      case Activation::kGeGlu:
        return f.template operator()<Activation::kGeGlu, T>();
      case Activation::kGelu:
        return f.template operator()<Activation::kGelu, T>();
    }
  });
}

template <typename T, typename V>
auto* pointer(const V& view) {
  return view.data ? view.template as<T>() : nullptr;
}

}  // namespace

void activation_forward(const View& y, const Fp8View* y8, const ConstView& gate,
                        const ConstView& up, Activation activation, Stream& stream) {
  for_kernel(activation, gate.dtype, [&]<Activation kActivation, typename T>() {
    const int64_t rows = gate.rows(), width = gate.cols();
    const bool vector = wide<T>(width, {y.data, gate.data, up.data});
    const int64_t packs = rows * ceil_div(width, kWarpElements<T>) * 32;
    forward_kernel<kActivation, T><<<grid_for(packs), kThreads, 0, native(stream)>>>(
        pointer<T>(y), RowCodes(y8, kWide<T>), gate.as<T>(), pointer<T>(up), rows, width, vector);
  });
  CUDA_CHECK_LAUNCH("activation_forward");
}

void activation_backward(const View& dgate, const View& dup, const ConstView& dy,
                         const ConstView& gate, const ConstView& up, Activation activation,
                         Stream& stream) {
  for_kernel(activation, dy.dtype, [&]<Activation kActivation, typename T>() {
    const int64_t count = dy.elements();
    // Flat: only the end of the tensor may be cut, and its start is aligned or nothing is.
    const bool vector = wide<T>(kWide<T>, {dgate.data, dup.data, dy.data, gate.data, up.data});
    backward_kernel<kActivation, T>
        <<<grid_for(ceil_div(count, kWide<T>)), kThreads, 0, native(stream)>>>(
            dgate.as<T>(), pointer<T>(dup), dy.as<T>(), gate.as<T>(), pointer<T>(up), count,
            vector);
  });
  CUDA_CHECK_LAUNCH("activation_backward");
}

}  // namespace rowshard::cuda
