#include <cmath>
#include <vector>

#include "layers/column_sum.h"
#include "layers/dispatch.h"
#include "layers/host_quantize.h"
#include "layers/norm.h"
#include "layers/norm_device.h"

namespace rowshard {

const char* to_string(NormKind kind) {
  return kind == NormKind::kRms ? "rms_norm" : "layer_norm";
}

Shape norm_statistics_shape(NormKind kind, int64_t rows) {
  return kind == NormKind::kRms ? Shape{rows} : Shape{2, rows};
}

namespace host {
namespace {

// Sums over a row are f64, so that they do not show how the compiler cut them.
template <typename T>
struct Row {
  using A = Accumulator<T>;
  const T* x;
  const T* weight;
  const T* bias;  // or null
  int64_t width;

  A mean() const {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i)
      sum += widen(x[i]);
    return static_cast<A>(sum / static_cast<double>(width));
  }
  A rstd(A mean, A eps) const {
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i)
      squares += (widen(x[i]) - mean) * (widen(x[i]) - mean);
    return static_cast<A>(1 / std::sqrt(squares / static_cast<double>(width) + eps));
  }
  void rms(T* y, A rstd) const {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      y[i] = narrow<T>(widen(narrow<T>(widen(x[i]) * rstd)) * widen(weight[i]));
  }
  void layer(T* y, A mean, A rstd) const {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const A scaled = (widen(x[i]) - mean) * rstd * widen(weight[i]);
      y[i] = narrow<T>(bias ? scaled + widen(bias[i]) : scaled);
    }
  }
};

template <typename T>
void forward(const View& y, const Fp8View* y8, const View& statistics, const ConstView& x,
             const Norm& norm) {
  using A = Accumulator<T>;
  const int64_t rows = x.rows(), width = x.cols();
  const bool layer = norm.kind == NormKind::kLayer;
  A* means = statistics.as<A>();
  A* rstds = means + (layer ? rows : 0);
#pragma omp parallel if (rows * width > kParallelElements)
  {
    std::vector<T> scratch(y.data ? 0 : width);
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      const Row<T> in{x.as<T>() + row * width, norm.weight.as<T>(),
                      norm.bias.data ? norm.bias.as<T>() : nullptr, width};
      T* out = y.data ? y.as<T>() + row * width : scratch.data();
      const A mean = layer ? in.mean() : 0;
      const A rstd = in.rstd(mean, static_cast<A>(norm.eps));
      if (layer) {
        means[row] = mean;
        in.layer(out, mean, rstd);
      } else {
        in.rms(out, rstd);
      }
      rstds[row] = rstd;
      if constexpr (!std::is_same_v<T, double>) {
        if (y8)
          quantize_row(*y8, row, out);
      }
    }
  }
}

template <typename T, bool kLayer>
void backward(const View& dx, const ConstView& dy, const ConstView& x, const Norm& norm,
              const ConstView& statistics, bool accumulate) {
  using A = Accumulator<T>;
  const int64_t rows = x.rows(), width = x.cols();
  const A* means = statistics.as<A>();
  const A* rstds = means + (kLayer ? rows : 0);
  const T* weight = norm.weight.as<T>();
#pragma omp parallel for if (rows * width > kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x.as<T>() + row * width;
    const T* grad = dy.as<T>() + row * width;
    T* out = dx.as<T>() + row * width;
    const A r = rstds[row], mean = kLayer ? means[row] : 0;
    double dot = 0, sum = 0;
#pragma omp simd reduction(+ : dot, sum)
    for (int64_t i = 0; i < width; ++i) {
      const A g = widen(grad[i]) * widen(weight[i]);
      dot += g * ((widen(in[i]) - mean) * r);
      if constexpr (kLayer)
        sum += g;
    }
    const A mean_dot = static_cast<A>(dot / static_cast<double>(width));
    const A mean_g = static_cast<A>(sum / static_cast<double>(width));
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      A g = widen(grad[i]) * widen(weight[i]) - (widen(in[i]) - mean) * r * mean_dot;
      if constexpr (kLayer)
        g -= mean_g;
      out[i] = narrow<T>(accumulate ? widen(out[i]) + r * g : r * g);
    }
  }
}

}  // namespace

void norm_forward(const View& y, const Fp8View* y8, const View& statistics, const ConstView& x,
                  const Norm& norm, Stream&) {
  for_host_type(x.dtype, "norm_forward",
                [&](auto type) { forward<decltype(type)>(y, y8, statistics, x, norm); });
}

void norm_backward(const View& dx, const ConstView& dy, const ConstView& x, const Norm& norm,
                   const ConstView& statistics, bool accumulate, Stream&) {
  for_host_type(x.dtype, "norm_backward", [&](auto type) {
    using T = decltype(type);
    norm.kind == NormKind::kLayer ? backward<T, true>(dx, dy, x, norm, statistics, accumulate)
                                  : backward<T, false>(dx, dy, x, norm, statistics, accumulate);
  });
}

void norm_weight_gradient(const View& dweight, const View&, const ConstView& dy, const ConstView& x,
                          NormKind kind, const ConstView& statistics, Stream&) {
  for_host_type(x.dtype, "norm_backward", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    const int64_t rows = x.rows(), width = x.cols();
    const bool layer = kind == NormKind::kLayer;
    const A* means = statistics.as<A>();
    const A* rstds = means + (layer ? rows : 0);
    // Row by row, so that a column is summed in row order and every pass reads memory in order.
    std::vector<A> total(width, 0);
    for (int64_t row = 0; row < rows; ++row) {
      const T* grad = dy.as<T>() + row * width;
      const T* in = x.as<T>() + row * width;
      const A r = rstds[row], mean = layer ? means[row] : 0;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i)
        total[i] += widen(grad[i]) * ((widen(in[i]) - mean) * r);
    }
    A* out = dweight.as<A>();
    for (int64_t i = 0; i < width; ++i)
      out[i] += total[i];
  });
}

}  // namespace host

namespace {

void check_norm(const char* operation, const ConstView& y, const ConstView& x, const Norm& norm,
                const ConstView& statistics) {
  const auto parameter = [&](const ConstView& p) {
    return p.shape == Shape{x.cols()} && p.dtype == x.dtype && p.device == x.device;
  };
  check_operands(
      is_float_dtype(x.dtype) && (y.data == nullptr || same_operands(x, {y})) &&
          parameter(norm.weight) &&
          (norm.bias.data == nullptr || (parameter(norm.bias) && norm.kind == NormKind::kLayer)) &&
          statistics.shape == norm_statistics_shape(norm.kind, x.rows()) &&
          statistics.dtype == accumulator_dtype(x.dtype) && statistics.device == x.device,
      operation,
      norm.kind == NormKind::kRms
          ? "of RMSNorm: y and x [rows, H], weight [H], no bias, statistics [rows]"
          : "of LayerNorm: y and x [rows, H], weight and bias [H], statistics [2, rows]",
      {{"y", y}, {"x", x}, {"weight", norm.weight}, {"bias", norm.bias}, {"stats", statistics}});
}

}  // namespace

void norm_forward(const View& y, const Fp8View* y8, const View& statistics, const ConstView& x,
                  const Norm& norm, Stream& stream) {
  check_norm("norm_forward", y, x, norm, statistics);
  check_fused_codes("norm_forward", y8, x);
  ROWSHARD_CHECK(y.data || y8, LogicError, "norm_forward: neither y nor its codes were asked for");
  if (x.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, norm_forward(y, y8, statistics, x, norm, stream));
}

void norm_backward(const View& dx, const ConstView& dy, const ConstView& x, const Norm& norm,
                   const ConstView& statistics, bool accumulate, const NormGradients& gradients,
                   Context& ctx) {
  check_norm("norm_backward", dx, x, norm, statistics);
  const auto gradient = [&](const View& g) {
    return g.data == nullptr || (g.shape == Shape{x.cols()} && g.device == x.device &&
                                 g.dtype == accumulator_dtype(x.dtype));
  };
  check_operands(
      same_operands(x, {dy}) && gradient(gradients.weight) && gradient(gradients.bias) &&
          !(accumulate && dx.data == dy.data) &&
          !(gradients.bias.data && norm.kind == NormKind::kRms),
      "norm_backward",
      "dx, dy and x [rows, H], dweight and dbias [H] f32, dx not dy when accumulating",
      {{"dx", dx}, {"dy", dy}, {"x", x}, {"dweight", gradients.weight}, {"dbias", gradients.bias}});
  if (x.elements() == 0)
    return;
  // Before dx, which may be dy.
  if (gradients.bias.data)
    add_column_sums(gradients.bias, dy.reshape({x.rows(), x.cols()}), ctx);
  if (gradients.weight.data) {
    const Tensor parts = column_parts(x.cols(), gradients.weight.dtype, ctx);
    ROWSHARD_DISPATCH(x.device, norm_weight_gradient(gradients.weight, parts, dy, x, norm.kind,
                                                     statistics, ctx.stream));
  }
  if (dx.data)
    ROWSHARD_DISPATCH(x.device, norm_backward(dx, dy, x, norm, statistics, accumulate, ctx.stream));
}

}  // namespace rowshard
