#include "layers/cross_entropy.h"
#include "layers/dispatch.h"
#include "layers/kernel.cuh"
#include "layers/softmax_totals.h"

namespace rowshard::cuda {
namespace {

constexpr int kRowThreads = 1024;

// A maximum and the sum of exponentials under it; merging two keeps both meanings.
struct Softmax {
  float maximum = -INFINITY;
  float total = 0;

  __device__ void add(float value) {
    if (value > maximum) {
      total = total * expf(maximum - value) + 1;
      maximum = value;
    } else if (value != -INFINITY) {   // adds nothing, and −∞ − (−∞) would be NaN
      total += expf(value - maximum);  // a NaN ends here and stays
    }
  }
  __device__ void merge(const Softmax& other) {
    const float joint = fmaxf(maximum, other.maximum);
    if (joint == -INFINITY) {  // nothing seen yet, or NaN only
      total += other.total;
      return;
    }
    total = total * expf(maximum - joint) + other.total * expf(other.maximum - joint);
    maximum = joint;
  }
};

__device__ Softmax warp_merge(Softmax mine) {
  for (int mask = 16; mask > 0; mask /= 2) {
    mine.merge({__shfl_xor_sync(0xffffffffu, mine.maximum, mask),
                __shfl_xor_sync(0xffffffffu, mine.total, mask)});
  }
  return mine;
}

// Over one row, by the whole block; thread 0 calls `meanwhile` before the barrier.
template <typename T, int kWidth, typename F>
__device__ Softmax row_softmax(const T* z, int64_t width, F meanwhile) {
  __shared__ float maxima[kRowThreads / 32], totals[kRowThreads / 32];
  Softmax mine;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    const auto in = load<kWidth>(z + i);
    for (int e = 0; e < kWidth; ++e)
      mine.add(widen(in.values[e]));
  }
  mine = warp_merge(mine);
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = mine.maximum;
    totals[threadIdx.x / 32] = mine.total;
  }
  if (threadIdx.x == 0)
    meanwhile();
  __syncthreads();
  static_assert(kRowThreads == 32 * 32, "every lane merges one warp");
  return warp_merge({maxima[threadIdx.x % 32], totals[threadIdx.x % 32]});
}

// One block a row: one pass for the softmax, and with kGradient one more that replaces the row.
template <typename T, int kWidth, bool kGradient>
__global__ void __launch_bounds__(kRowThreads)
    row_kernel(float* losses, T* logits, const int32_t* labels, int64_t width,
               Argument<double> scale_at) {
  const int64_t row = blockIdx.x;
  T* z = logits + row * width;
  const int64_t label = labels[row];
  const float scale = label == kNoLoss ? 0 : static_cast<float>(scale_at.get());
  const Softmax all = row_softmax<T, kWidth>(z, width, [&] {
    // Read before the row is replaced, which starts after the barrier.
    losses[row] = label >= 0 && label < width ? widen(z[label]) : NAN;
  });
  if (threadIdx.x == 0) {
    losses[row] = label == kNoLoss
                      ? 0
                      : static_cast<float>(log(static_cast<double>(all.total)) +
                                           (static_cast<double>(all.maximum) - losses[row]));
  }
  if constexpr (kGradient) {
    const float factor = scale / all.total;
    for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
      auto pack = load<kWidth>(z + i);
      for (int e = 0; e < kWidth; ++e) {
        const float p = expf(widen(pack.values[e]) - all.maximum);
        // (p / total − 1) · scale for the label: the difference first, it may be small.
        pack.values[e] = narrow<T>(i + e == label ? (p / all.total - 1) * scale : p * factor);
      }
      store(z + i, pack);
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    statistics_kernel(double* statistics, const T* logits, const int32_t* labels, int64_t first,
                      int64_t vocabulary, int64_t width) {
  const int64_t row = blockIdx.x, rows = gridDim.x, label = labels[row];
  const T* z = logits + row * width;
  const Softmax all = row_softmax<T, kWidth>(z, width, [] {});
  if (threadIdx.x != 0)
    return;
  const int64_t at = label - first;
  statistics[row] = all.maximum;
  statistics[rows + row] = all.total;
  statistics[2 * rows + row] = label < 0 || label >= vocabulary ? NAN
                               : at >= 0 && at < width          ? widen(z[at])
                                                                : 0.0;
}

__global__ void losses_kernel(float* losses, const double* statistics, int parts, int64_t rows) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (row >= rows)
    return;
  const SoftmaxTotals all = combine_statistics(statistics, parts, rows, row);
  losses[row] = static_cast<float>(log(all.total) + (all.maximum - all.target));
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    gradient_kernel(T* logits, const double* statistics, int parts, const int32_t* labels,
                    int64_t first, int64_t width, Argument<double> scale_at) {
  const float scale = static_cast<float>(scale_at.get());
  const int64_t row = blockIdx.x;
  T* z = logits + row * width;
  const int64_t label = labels[row] - first;
  const SoftmaxTotals all = combine_statistics(statistics, parts, gridDim.x, row);
  const float maximum = static_cast<float>(all.maximum), total = static_cast<float>(all.total);
  const float factor = scale / total;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    auto pack = load<kWidth>(z + i);
    for (int e = 0; e < kWidth; ++e) {
      const float p = expf(widen(pack.values[e]) - maximum);
      pack.values[e] = narrow<T>(i + e == label ? (p / total - 1) * scale : p * factor);
    }
    store(z + i, pack);
  }
}

template <bool kGradient>
void launch(float* losses, void* logits, DType dtype, const ConstView& labels, int64_t width,
            Argument<double> scale, Stream& stream) {
  for_cuda_type(dtype, "cross_entropy", [&](auto type) {
    using T = decltype(type);
    const auto run = [&]<int kWidth>() {
      row_kernel<T, kWidth, kGradient>
          <<<static_cast<unsigned>(labels.elements()), kRowThreads, 0, native(stream)>>>(
              losses, static_cast<T*>(logits), labels.as<int32_t>(), width, scale);
    };
    wide<T>(width, {logits}) ? run.template operator()<kWide<T>>() : run.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("cross_entropy");
}

}  // namespace

void cross_entropy(const View& losses, const View& logits, const ConstView& labels,
                   Argument<double> scale, Stream& stream) {
  launch<true>(losses.as<float>(), logits.data, logits.dtype, labels, logits.dim(1), scale, stream);
}

void token_losses(const View& losses, const ConstView& logits, const ConstView& labels,
                  Stream& stream) {
  // Without kGradient the kernel does not write through the pointer.
  launch<false>(losses.as<float>(), const_cast<void*>(logits.data), logits.dtype, labels,
                logits.dim(1), 0, stream);
}

void softmax_statistics(const View& statistics, const ConstView& logits, const ConstView& labels,
                        int64_t first, int64_t vocabulary, Stream& stream) {
  for_cuda_type(logits.dtype, "softmax_statistics", [&](auto type) {
    using T = decltype(type);
    const int64_t width = logits.dim(1);
    const auto run = [&]<int kWidth>() {
      statistics_kernel<T, kWidth>
          <<<static_cast<unsigned>(labels.elements()), kRowThreads, 0, native(stream)>>>(
              statistics.as<double>(), logits.as<T>(), labels.as<int32_t>(), first, vocabulary,
              width);
    };
    wide<T>(width, {logits.data}) ? run.template operator()<kWide<T>>()
                                  : run.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("softmax_statistics");
}

void losses_of_statistics(const View& losses, const ConstView& statistics, Stream& stream) {
  const int64_t rows = losses.elements();
  losses_kernel<<<static_cast<unsigned>(ceil_div(rows, kThreads)), kThreads, 0, native(stream)>>>(
      losses.as<float>(), statistics.as<double>(), static_cast<int>(statistics.dim(0)), rows);
  CUDA_CHECK_LAUNCH("losses_of_statistics");
}

void cross_entropy_gradient(const View& logits, const ConstView& statistics,
                            const ConstView& labels, int64_t first, Argument<double> scale,
                            Stream& stream) {
  for_cuda_type(logits.dtype, "cross_entropy_gradient", [&](auto type) {
    using T = decltype(type);
    const int64_t width = logits.dim(1);
    const auto run = [&]<int kWidth>() {
      gradient_kernel<T, kWidth>
          <<<static_cast<unsigned>(labels.elements()), kRowThreads, 0, native(stream)>>>(
              logits.as<T>(), statistics.as<double>(), static_cast<int>(statistics.dim(0)),
              labels.as<int32_t>(), first, width, scale);
    };
    wide<T>(width, {logits.data}) ? run.template operator()<kWide<T>>()
                                  : run.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("cross_entropy_gradient");
}

}  // namespace rowshard::cuda
