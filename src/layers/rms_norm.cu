#include "layers/dispatch.h"
#include "layers/kernel.cuh"
#include "layers/rms_norm.h"

namespace rowshard::cuda {
namespace {

// One block a row; the row is read twice, the second time from cache.
template <typename T, int kWidth>
__global__ void forward_kernel(T* y, float* rstd, const T* x, const T* weight, int64_t width,
                               float eps) {
  const int64_t row = blockIdx.x;
  x += row * width;
  y += row * width;
  float squares = 0;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    const auto in = load<kWidth>(x + i);
    for (int e = 0; e < kWidth; ++e)
      squares += widen(in.values[e]) * widen(in.values[e]);
  }
  const float r = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(width) + eps);
  if (threadIdx.x == 0)
    rstd[row] = r;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    const auto in = load<kWidth>(x + i);
    const auto w = load<kWidth>(weight + i);
    Pack<T, kWidth> out;
    for (int e = 0; e < kWidth; ++e) {
      out.values[e] = narrow<T>(widen(narrow<T>(widen(in.values[e]) * r)) * widen(w.values[e]));
    }
    store(y + i, out);
  }
}

template <typename T, int kWidth>
__global__ void backward_kernel(T* dx, const T* dy, const T* x, const T* weight, const float* rstd,
                                int64_t width, bool accumulate) {
  const int64_t row = blockIdx.x;
  x += row * width;
  dy += row * width;
  dx += row * width;
  const float r = rstd[row];
  float dot = 0;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    const auto in = load<kWidth>(x + i);
    const auto grad = load<kWidth>(dy + i);
    const auto w = load<kWidth>(weight + i);
    for (int e = 0; e < kWidth; ++e) {
      dot += widen(grad.values[e]) * widen(w.values[e]) * (widen(in.values[e]) * r);
    }
  }
  const float mean = block_sum(dot) / static_cast<float>(width);
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    const auto in = load<kWidth>(x + i);
    const auto grad = load<kWidth>(dy + i);
    const auto w = load<kWidth>(weight + i);
    Pack<T, kWidth> out;
    if (accumulate)
      out = load<kWidth>(dx + i);
    for (int e = 0; e < kWidth; ++e) {
      const float g =
          r * (widen(grad.values[e]) * widen(w.values[e]) - widen(in.values[e]) * r * mean);
      out.values[e] = narrow<T>(accumulate ? widen(out.values[e]) + g : g);
    }
    store(dx + i, out);
  }
}

// Block row b sums rows b, b + parts, …; a second kernel adds the parts in order.
constexpr int kParts = 64;

template <typename T>
__global__ void weight_parts_kernel(float* parts, const T* dy, const T* x, const float* rstd,
                                    int64_t rows, int64_t width) {
  const int64_t column = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (column >= width)
    return;
  float total = 0;
  for (int64_t row = blockIdx.y; row < rows; row += kParts) {
    total += widen(dy[row * width + column]) * (widen(x[row * width + column]) * rstd[row]);
  }
  parts[blockIdx.y * width + column] = total;
}

__global__ void weight_total_kernel(float* dweight, const float* parts, int64_t width) {
  const int64_t column = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (column >= width)
    return;
  float total = 0;
  for (int part = 0; part < kParts; ++part)
    total += parts[part * width + column];
  dweight[column] += total;
}

}  // namespace

void rms_norm(const View& y, const View& rstd, const ConstView& x, const ConstView& weight,
              double eps, Stream& stream) {
  for_cuda_type(x.dtype, "rms_norm", [&](auto type) {
    using T = decltype(type);
    const int64_t width = x.cols();
    const auto launch = [&]<int kWidth>() {
      const unsigned threads = threads_for_row(width / kWidth, 512);
      forward_kernel<T, kWidth><<<static_cast<unsigned>(x.rows()), threads, 0, native(stream)>>>(
          y.as<T>(), rstd.as<float>(), x.as<T>(), weight.as<T>(), width, static_cast<float>(eps));
    };
    wide<T>(width, {y.data, x.data, weight.data}) ? launch.template operator()<kWide<T>>()
                                                  : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("rms_norm");
}

void rms_norm_backward(const View& dx, const ConstView& dy, const ConstView& x,
                       const ConstView& weight, const ConstView& rstd, bool accumulate,
                       const View& dweight, Context& ctx) {
  const cudaStream_t stream = native(ctx.stream);
  const int64_t rows = x.rows(), width = x.cols();
  for_cuda_type(x.dtype, "rms_norm_backward", [&](auto type) {
    using T = decltype(type);
    if (dweight.data != nullptr) {  // first: dx may be dy
      const Tensor parts =
          ctx.arena.tensor(Category::kWorkspace, "rms_norm.parts", DType::kF32, {kParts, width});
      const unsigned columns = static_cast<unsigned>(ceil_div(width, kThreads));
      weight_parts_kernel<<<dim3(columns, kParts), kThreads, 0, stream>>>(
          parts.as<float>(), dy.as<T>(), x.as<T>(), rstd.as<float>(), rows, width);
      weight_total_kernel<<<columns, kThreads, 0, stream>>>(dweight.as<float>(), parts.as<float>(),
                                                            width);
      CUDA_CHECK_LAUNCH("rms_norm_backward (weight)");
    }
    const auto launch = [&]<int kWidth>() {
      const unsigned threads = threads_for_row(width / kWidth, 512);
      backward_kernel<T, kWidth><<<static_cast<unsigned>(rows), threads, 0, stream>>>(
          dx.as<T>(), dy.as<T>(), x.as<T>(), weight.as<T>(), rstd.as<float>(), width, accumulate);
    };
    wide<T>(width, {dx.data, dy.data, x.data, weight.data}) ? launch.template operator()<kWide<T>>()
                                                            : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("rms_norm_backward");
}

}  // namespace rowshard::cuda
