#include <cmath>
#include <vector>

#include "layers/dispatch.h"
#include "layers/rms_norm.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void rms_norm(const View& y, const View& rstd, const ConstView& x, const ConstView& weight,
              double eps, Stream& stream);
void rms_norm_backward(const View& dx, const ConstView& dy, const ConstView& x,
                       const ConstView& weight, const ConstView& rstd, bool accumulate,
                       const View& dweight, Context& ctx);
}  // namespace cuda
#endif

namespace host {
namespace {

template <typename T>
void forward(T* y, Accumulator<T>* rstd, const T* x, const T* weight, int64_t rows, int64_t width,
             Accumulator<T> eps) {
  using A = Accumulator<T>;
#pragma omp parallel for if (rows * width > kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * width;
    T* out = y + row * width;
    A squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i)
      squares += widen(in[i]) * widen(in[i]);
    const A r = 1 / std::sqrt(squares / static_cast<A>(width) + eps);
    rstd[row] = r;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      out[i] = narrow<T>(widen(narrow<T>(widen(in[i]) * r)) * widen(weight[i]));
    }
  }
}

template <typename T>
void backward(T* dx, const T* dy, const T* x, const T* weight, const Accumulator<T>* rstd,
              int64_t rows, int64_t width, bool accumulate) {
  using A = Accumulator<T>;
#pragma omp parallel for if (rows * width > kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * width;
    const T* grad = dy + row * width;
    T* out = dx + row * width;
    const A r = rstd[row];
    A dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < width; ++i) {
      dot += widen(grad[i]) * widen(weight[i]) * (widen(in[i]) * r);
    }
    const A mean = dot / static_cast<A>(width);
    if (accumulate) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const A g = r * (widen(grad[i]) * widen(weight[i]) - widen(in[i]) * r * mean);
        out[i] = narrow<T>(widen(out[i]) + g);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        out[i] = narrow<T>(r * (widen(grad[i]) * widen(weight[i]) - widen(in[i]) * r * mean));
      }
    }
  }
}

template <typename T>
void backward_weight(Accumulator<T>* dweight, const T* dy, const T* x, const Accumulator<T>* rstd,
                     int64_t rows, int64_t width) {
  // Row by row, so that a column is summed in row order and every pass reads memory in order.
  std::vector<Accumulator<T>> total(width, 0);
  for (int64_t row = 0; row < rows; ++row) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      total[i] += widen(dy[row * width + i]) * (widen(x[row * width + i]) * rstd[row]);
    }
  }
  for (int64_t i = 0; i < width; ++i)
    dweight[i] += total[i];
}

}  // namespace

void rms_norm(const View& y, const View& rstd, const ConstView& x, const ConstView& weight,
              double eps, Stream&) {
  for_host_type(x.dtype, "rms_norm", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    forward<T>(y.as<T>(), rstd.as<A>(), x.as<T>(), weight.as<T>(), x.rows(), x.cols(),
               static_cast<A>(eps));
  });
}

void rms_norm_backward(const View& dx, const ConstView& dy, const ConstView& x,
                       const ConstView& weight, const ConstView& rstd, bool accumulate,
                       const View& dweight, Context&) {
  for_host_type(x.dtype, "rms_norm_backward", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    if (dweight.data != nullptr) {  // first: dx may be dy
      backward_weight<T>(dweight.as<A>(), dy.as<T>(), x.as<T>(), rstd.as<A>(), x.rows(), x.cols());
    }
    backward<T>(dx.as<T>(), dy.as<T>(), x.as<T>(), weight.as<T>(), rstd.as<A>(), x.rows(), x.cols(),
                accumulate);
  });
}

}  // namespace host

void rms_norm(const View& y, const View& rstd, const ConstView& x, const ConstView& weight,
              double eps, Stream& stream) {
  check_operands(same_operands(x, {y}) && weight.dtype == x.dtype && weight.device == x.device &&
                     weight.shape == Shape{x.cols()} && rstd.elements() == x.rows() &&
                     rstd.dtype == accumulator_dtype(x.dtype) && rstd.device == x.device,
                 "rms_norm", "y and x [rows, H], weight [H], rstd [rows]",
                 {{"y", y}, {"rstd", rstd}, {"x", x}, {"weight", weight}});
  if (x.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, rms_norm(y, rstd, x, weight, eps, stream));
}

void rms_norm_backward(const View& dx, const ConstView& dy, const ConstView& x,
                       const ConstView& weight, const ConstView& rstd, bool accumulate,
                       const View& dweight, Context& ctx) {
  const DType wide = accumulator_dtype(x.dtype);
  check_operands(
      same_operands(x, {dx, dy}) && weight.dtype == x.dtype && weight.device == x.device &&
          weight.shape == Shape{x.cols()} && rstd.elements() == x.rows() && rstd.dtype == wide &&
          rstd.device == x.device &&
          (dweight.data == nullptr || (dweight.shape == weight.shape && dweight.dtype == wide &&
                                       dweight.device == x.device)) &&
          !(accumulate && dx.data == dy.data),
      "rms_norm_backward",
      "dx, dy and x [rows, H], weight and dweight [H], rstd [rows], dx not dy when "
      "accumulating",
      {{"dx", dx}, {"dy", dy}, {"x", x}, {"weight", weight}, {"rstd", rstd}, {"dweight", dweight}});
  if (x.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, rms_norm_backward(dx, dy, x, weight, rstd, accumulate, dweight, ctx));
}

}  // namespace rowshard
