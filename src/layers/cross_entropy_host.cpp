#include <algorithm>
#include <cmath>

#include "layers/cross_entropy.h"
#include "layers/dispatch.h"
#include "layers/elementwise.h"
#include "layers/host_math.h"
#include "layers/softmax_totals.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void cross_entropy(const View& losses, const View& logits, const ConstView& labels,
                   Argument<double> scale, Stream& stream);
void token_losses(const View& losses, const ConstView& logits, const ConstView& labels,
                  Stream& stream);
void softmax_statistics(const View& statistics, const ConstView& logits, const ConstView& labels,
                        int64_t first, int64_t vocabulary, Stream& stream);
void losses_of_statistics(const View& losses, const ConstView& statistics, Stream& stream);
void cross_entropy_gradient(const View& logits, const ConstView& statistics,
                            const ConstView& labels, int64_t first, Argument<double> scale,
                            Stream& stream);
}  // namespace cuda
#endif

namespace host {
namespace {

void check_labels(const ConstView& labels, int64_t vocabulary, bool or_none) {
  const int32_t* label = labels.as<int32_t>();
  for (int64_t i = 0; i < labels.elements(); ++i) {
    ROWSHARD_CHECK((label[i] >= 0 && label[i] < vocabulary) || (or_none && label[i] == kNoLoss),
                   ShapeError, "label ", label[i], " of row ", i, " is outside the vocabulary of ",
                   vocabulary, "; leave rows without a label out with gather_rows");
  }
}

template <typename T>
Accumulator<T> row_maximum(const T* z, int64_t width) {
  Accumulator<T> maximum = widen(z[0]);
#pragma omp simd reduction(max : maximum)
  for (int64_t v = 0; v < width; ++v)
    maximum = std::max(maximum, widen(z[v]));
  return maximum;
}

// f32 partial sums of 49152 terms would lose bits in one long chain: one partial a block, then f64.
constexpr int64_t kBlock = 4096;

template <typename T>
double exponential_sum(const T* z, Accumulator<T> maximum, int64_t width) {
  double total = 0;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, width);
    Accumulator<T> partial = 0;
#pragma omp simd reduction(+ : partial)
    for (int64_t v = begin; v < end; ++v)
      partial += fast_exp(widen(z[v]) - maximum);
    total += partial;
  }
  return total;
}

// With kGradient every row is replaced by its gradient; else nothing is written through `logits`.
template <bool kGradient>
void row_losses(const View& losses, void* logits, const ConstView& like, const ConstView& labels,
                double scale) {
  check_labels(labels, like.dim(1), true);
  for_host_type(like.dtype, "cross_entropy", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    const int64_t rows = like.dim(0), width = like.dim(1);
    const int32_t* label = labels.as<int32_t>();
    A* loss = losses.as<A>();
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
      T* z = static_cast<T*>(logits) + row * width;
      if (label[row] == kNoLoss) {
        loss[row] = 0;
        if constexpr (kGradient)
          std::fill_n(z, width, T{});
        continue;
      }
      const A maximum = row_maximum(z, width);
      const double total = exponential_sum(z, maximum, width);
      const A target = widen(z[label[row]]);
      loss[row] = static_cast<A>(std::log(total) + (maximum - target));
      if constexpr (kGradient) {
        const A factor = static_cast<A>(scale / total);
#pragma omp simd
        for (int64_t v = 0; v < width; ++v) {
          z[v] = narrow<T>(fast_exp(widen(z[v]) - maximum) * factor);
        }
        z[label[row]] =
            narrow<T>(static_cast<A>((std::exp(double{target} - maximum) / total - 1) * scale));
      }
    }
  });
}

}  // namespace

void cross_entropy(const View& losses, const View& logits, const ConstView& labels,
                   Argument<double> scale, Stream&) {
  row_losses<true>(losses, logits.data, logits, labels, scale.get());
}

void token_losses(const View& losses, const ConstView& logits, const ConstView& labels, Stream&) {
  row_losses<false>(losses, const_cast<void*>(logits.data), logits, labels, 0);
}

void softmax_statistics(const View& statistics, const ConstView& logits, const ConstView& labels,
                        int64_t first, int64_t vocabulary, Stream&) {
  check_labels(labels, vocabulary, false);
  for_host_type(logits.dtype, "softmax_statistics", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = logits.dim(0), width = logits.dim(1);
    const int32_t* label = labels.as<int32_t>();
    double* out = statistics.as<double>();
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
      const T* z = logits.as<T>() + row * width;
      const auto maximum = row_maximum(z, width);
      const int64_t at = label[row] - first;
      out[row] = maximum;
      out[rows + row] = exponential_sum(z, maximum, width);
      out[2 * rows + row] = at >= 0 && at < width ? double{widen(z[at])} : 0.0;
    }
  });
}

namespace {

/// The whole row's maximum, sum of exponentials and label's logit, from those of the parts.
SoftmaxTotals totals_of(const ConstView& statistics, int64_t row) {
  return combine_statistics(statistics.as<double>(), static_cast<int>(statistics.dim(0)),
                            statistics.dim(2), row);
}

}  // namespace

void losses_of_statistics(const View& losses, const ConstView& statistics, Stream&) {
  for_host_type(losses.dtype, "losses_of_statistics", [&](auto type) {
    using A = decltype(type);
    A* loss = losses.as<A>();
    for (int64_t row = 0; row < losses.elements(); ++row) {
      const SoftmaxTotals totals = totals_of(statistics, row);
      loss[row] = static_cast<A>(
          static_cast<Accumulator<A>>(std::log(totals.total) + (totals.maximum - totals.target)));
    }
  });
}

void cross_entropy_gradient(const View& logits, const ConstView& statistics,
                            const ConstView& labels, int64_t first, Argument<double> scale_at,
                            Stream&) {
  const double scale = scale_at.get();
  for_host_type(logits.dtype, "cross_entropy_gradient", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    const int64_t rows = logits.dim(0), width = logits.dim(1);
    const int32_t* label = labels.as<int32_t>();
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
      T* z = logits.as<T>() + row * width;
      const SoftmaxTotals totals = totals_of(statistics, row);
      const A maximum = static_cast<A>(totals.maximum);
      const A factor = static_cast<A>(scale / totals.total);
#pragma omp simd
      for (int64_t v = 0; v < width; ++v) {
        z[v] = narrow<T>(fast_exp(widen(z[v]) - maximum) * factor);
      }
      const int64_t at = label[row] - first;
      if (at >= 0 && at < width) {
        z[at] = narrow<T>(
            static_cast<A>((std::exp(totals.target - totals.maximum) / totals.total - 1) * scale));
      }
    }
  });
}

}  // namespace host

namespace {

bool logits_and_labels(const ConstView& logits, const ConstView& labels) {
  return logits.shape.rank() == 2 && logits.dim(1) > 0 && is_float_dtype(logits.dtype) &&
         labels.shape == Shape{logits.dim(0)} && labels.dtype == DType::kI32 &&
         labels.device == logits.device;
}

}  // namespace

void cross_entropy(const View& loss_sum, const View& logits, const ConstView& labels,
                   Argument<double> scale, Context& ctx) {
  check_operands(logits_and_labels(logits, labels), "cross_entropy",
                 "logits [n, V], labels [n] i32, loss_sum [1] f64",
                 {{"loss_sum", loss_sum}, {"logits", logits}, {"labels", labels}});
  Tensor losses = ctx.arena.tensor(Category::kWorkspace, "cross_entropy.losses",
                                   accumulator_dtype(logits.dtype), labels.shape);
  if (labels.elements() > 0) {
    ROWSHARD_DISPATCH(logits.device, cross_entropy(losses, logits, labels, scale, ctx.stream));
  }
  sum(loss_sum, losses, /*accumulate=*/true, ctx);
}

void token_losses(const View& losses, const ConstView& logits, const ConstView& labels,
                  Stream& stream) {
  check_operands(logits_and_labels(logits, labels) && losses.shape == labels.shape &&
                     losses.dtype == accumulator_dtype(logits.dtype) &&
                     losses.device == logits.device,
                 "token_losses", "losses [n] f32 (f64 for f64), logits [n, V], labels [n] i32",
                 {{"losses", losses}, {"logits", logits}, {"labels", labels}});
  if (labels.elements() == 0)
    return;
  ROWSHARD_DISPATCH(logits.device, token_losses(losses, logits, labels, stream));
}

void softmax_statistics(const View& statistics, const ConstView& logits, const ConstView& labels,
                        int64_t first, int64_t vocabulary, Stream& stream) {
  check_operands(logits_and_labels(logits, labels) && first >= 0 &&
                     first + logits.dim(1) <= vocabulary &&
                     statistics.shape == Shape{3, logits.dim(0)} &&
                     statistics.dtype == DType::kF64 && statistics.device == logits.device,
                 "softmax_statistics",
                 "statistics [3, n] f64, logits [n, V], labels [n] i32, a part of the vocabulary",
                 {{"statistics", statistics}, {"logits", logits}, {"labels", labels}});
  if (labels.elements() == 0)
    return;
  ROWSHARD_DISPATCH(logits.device,
                    softmax_statistics(statistics, logits, labels, first, vocabulary, stream));
}

namespace {

bool statistics_of(const ConstView& statistics, int64_t rows, Device device) {
  return statistics.shape.rank() == 3 && statistics.dim(0) > 0 && statistics.dim(1) == 3 &&
         statistics.dim(2) == rows && statistics.dtype == DType::kF64 &&
         statistics.device == device;
}

}  // namespace

void losses_of_statistics(const View& losses, const ConstView& statistics, Stream& stream) {
  check_operands(losses.shape.rank() == 1 &&
                     (losses.dtype == DType::kF32 || losses.dtype == DType::kF64) &&
                     statistics_of(statistics, losses.elements(), losses.device),
                 "losses_of_statistics", "losses [n] f32 or f64, statistics [p, 3, n] f64",
                 {{"losses", losses}, {"statistics", statistics}});
  if (losses.elements() == 0)
    return;
  ROWSHARD_DISPATCH(losses.device, losses_of_statistics(losses, statistics, stream));
}

void cross_entropy_gradient(const View& logits, const ConstView& statistics,
                            const ConstView& labels, int64_t first, Argument<double> scale,
                            Stream& stream) {
  check_operands(
      logits_and_labels(logits, labels) && statistics_of(statistics, logits.dim(0), logits.device),
      "cross_entropy_gradient", "logits [n, V], statistics [p, 3, n] f64, labels [n] i32",
      {{"logits", logits}, {"statistics", statistics}, {"labels", labels}});
  if (labels.elements() == 0)
    return;
  ROWSHARD_DISPATCH(logits.device,
                    cross_entropy_gradient(logits, statistics, labels, first, scale, stream));
}

}  // namespace rowshard
