#include "layers/column_sum.cuh"
#include "layers/dispatch.h"
#include "layers/norm_device.h"
#include "layers/row_pack.cuh"

namespace rowshard::cuda {
namespace {

// One block a row; the row is read again from cache for every pass over it.
template <typename T, bool kLayer>
__global__ void forward_kernel(T* y, RowCodes y8, float* means, float* rstds, const T* x,
                               const T* weight, const T* bias, int64_t width, float eps,
                               bool vector) {
  const int64_t row = blockIdx.x;
  const int64_t end = (width + kWarpElements<T> - 1) / kWarpElements<T> * kWarpElements<T>;
  const int64_t step = blockDim.x * int64_t{kWide<T>};
  x += row * width;
  float mean = 0;
  if constexpr (kLayer) {
    float sum = 0;
    for (int64_t i = threadIdx.x * kWide<T>; i < width; i += step) {
      const auto in = load_row(x + i, width - i, vector);
      for (int e = 0; e < kWide<T>; ++e)
        sum += widen(in.values[e]);
    }
    mean = block_sum(sum) / static_cast<float>(width);
  }
  float squares = 0;
  for (int64_t i = threadIdx.x * kWide<T>; i < width; i += step) {
    const auto in = load_row(x + i, width - i, vector);
    for (int e = 0; e < kWide<T>; ++e) {
      const float value =
          kLayer ? (i + e < width ? widen(in.values[e]) - mean : 0.0f) : widen(in.values[e]);
      squares += value * value;
    }
  }
  const float r = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(width) + eps);
  if (threadIdx.x == 0) {
    rstds[row] = r;
    if constexpr (kLayer)
      means[row] = mean;
  }
  for (int64_t i = threadIdx.x * kWide<T>; i < end; i += step) {
    const int64_t valid = width - i;
    const auto in = load_row(x + i, valid, vector);
    const auto w = load_row(weight + i, valid, vector);
    RowPack<T> out;
    if constexpr (kLayer) {
      RowPack<T> b;
      if (bias)
        b = load_row(bias + i, valid, vector);
      for (int e = 0; e < kWide<T>; ++e) {
        const float scaled = (widen(in.values[e]) - mean) * r * widen(w.values[e]);
        out.values[e] = narrow<T>(e < valid ? (bias ? scaled + widen(b.values[e]) : scaled) : 0.0f);
      }
    } else {
      for (int e = 0; e < kWide<T>; ++e)
        out.values[e] = narrow<T>(widen(narrow<T>(widen(in.values[e]) * r)) * widen(w.values[e]));
    }
    if (y && valid > 0)
      store_row(y + row * width + i, out, valid, vector);
    if (y8.codes)
      quantize_pack<T>(y8, row, i, out);
  }
}

template <typename T, bool kLayer>
__global__ void backward_kernel(T* dx, const T* dy, const T* x, const T* weight, const float* means,
                                const float* rstds, int64_t width, bool accumulate, bool vector) {
  const int64_t row = blockIdx.x;
  const int64_t step = blockDim.x * int64_t{kWide<T>};
  x += row * width;
  dy += row * width;
  dx += row * width;
  const float r = rstds[row], mean = kLayer ? means[row] : 0.0f;
  float dot = 0, sum = 0;
  for (int64_t i = threadIdx.x * kWide<T>; i < width; i += step) {
    const int64_t valid = width - i;
    const auto in = load_row(x + i, valid, vector);
    const auto grad = load_row(dy + i, valid, vector);
    const auto w = load_row(weight + i, valid, vector);
    for (int e = 0; e < kWide<T>; ++e) {
      const float g = widen(grad.values[e]) * widen(w.values[e]);  // 0 beyond the row
      dot += g * ((widen(in.values[e]) - mean) * r);
      if constexpr (kLayer)
        sum += g;
    }
  }
  const float mean_dot = block_sum(dot) / static_cast<float>(width);
  float mean_g = 0;
  if constexpr (kLayer)
    mean_g = block_sum(sum) / static_cast<float>(width);
  for (int64_t i = threadIdx.x * kWide<T>; i < width; i += step) {
    const int64_t valid = width - i;
    const auto in = load_row(x + i, valid, vector);
    const auto grad = load_row(dy + i, valid, vector);
    const auto w = load_row(weight + i, valid, vector);
    RowPack<T> out;
    if (accumulate)
      out = load_row(static_cast<const T*>(dx) + i, valid, vector);
    for (int e = 0; e < kWide<T>; ++e) {
      float g =
          widen(grad.values[e]) * widen(w.values[e]) - (widen(in.values[e]) - mean) * r * mean_dot;
      if constexpr (kLayer)
        g -= mean_g;
      out.values[e] = narrow<T>(accumulate ? widen(out.values[e]) + r * g : r * g);
    }
    store_row(dx + i, out, valid, vector);
  }
}

template <typename T>
struct WeightTerm {
  const T* dy;
  const T* x;
  const float* means;  // or null
  const float* rstds;
  int64_t width;
  __device__ float operator()(int64_t row, int64_t column) const {
    const float centred = widen(x[row * width + column]) - (means ? means[row] : 0.0f);
    return widen(dy[row * width + column]) * (centred * rstds[row]);
  }
};

template <typename T>
unsigned row_threads(int64_t width) {
  return threads_for_row(ceil_div(width, kWide<T>), 512);
}

}  // namespace

void norm_forward(const View& y, const Fp8View* y8, const View& statistics, const ConstView& x,
                  const Norm& norm, Stream& stream) {
  for_cuda_type(x.dtype, "norm_forward", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.rows(), width = x.cols();
    const bool layer = norm.kind == NormKind::kLayer;
    float* means = statistics.as<float>();
    T* out = y.data ? y.as<T>() : nullptr;
    const T* bias = norm.bias.data ? norm.bias.as<T>() : nullptr;
    const bool vector = wide<T>(width, {y.data, x.data, norm.weight.data, norm.bias.data});
    const auto kernel = layer ? forward_kernel<T, true> : forward_kernel<T, false>;
    kernel<<<static_cast<unsigned>(rows), row_threads<T>(width), 0, native(stream)>>>(
        out, RowCodes(y8, kWide<T>), means, means + (layer ? rows : 0), x.as<T>(),
        norm.weight.as<T>(), bias, width, static_cast<float>(norm.eps), vector);
  });
  CUDA_CHECK_LAUNCH("norm_forward");
}

void norm_backward(const View& dx, const ConstView& dy, const ConstView& x, const Norm& norm,
                   const ConstView& statistics, bool accumulate, Stream& stream) {
  for_cuda_type(x.dtype, "norm_backward", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.rows(), width = x.cols();
    const bool layer = norm.kind == NormKind::kLayer;
    const float* means = statistics.as<float>();
    const bool vector = wide<T>(width, {dx.data, dy.data, x.data, norm.weight.data});
    const auto kernel = layer ? backward_kernel<T, true> : backward_kernel<T, false>;
    kernel<<<static_cast<unsigned>(rows), row_threads<T>(width), 0, native(stream)>>>(
        dx.as<T>(), dy.as<T>(), x.as<T>(), norm.weight.as<T>(), means, means + (layer ? rows : 0),
        width, accumulate, vector);
  });
  CUDA_CHECK_LAUNCH("norm_backward");
}

void norm_weight_gradient(const View& dweight, const View& parts, const ConstView& dy,
                          const ConstView& x, NormKind kind, const ConstView& statistics,
                          Stream& stream) {
  for_cuda_type(x.dtype, "norm_backward", [&](auto type) {
    using T = decltype(type);
    const bool layer = kind == NormKind::kLayer;
    const float* means = statistics.as<float>();
    sum_columns(dweight, parts, x.rows(),
                WeightTerm<T>{dy.as<T>(), x.as<T>(), layer ? means : nullptr,
                              means + (layer ? x.rows() : 0), x.cols()},
                stream);
  });
  CUDA_CHECK_LAUNCH("norm_backward (weight)");
}

}  // namespace rowshard::cuda
