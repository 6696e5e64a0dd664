#include "layers/cross_entropy.h"
#include "layers/dispatch.h"
#include "layers/kernel.cuh"

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

// One block a row: one pass for the softmax, and with kGradient one more that replaces the row.
template <typename T, int kWidth, bool kGradient>
__global__ void __launch_bounds__(kRowThreads)
    row_kernel(float* losses, T* logits, const int32_t* labels, int64_t width, float scale) {
  __shared__ float maxima[kRowThreads / 32], totals[kRowThreads / 32];
  const int64_t row = blockIdx.x;
  T* z = logits + row * width;
  const int64_t label = labels[row];
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
  if (threadIdx.x == 0) {
    // Read before the row is replaced, which starts after the barrier.
    losses[row] = label >= 0 && label < width ? widen(z[label]) : NAN;
  }
  __syncthreads();
  static_assert(kRowThreads == 32 * 32, "every lane merges one warp");
  const Softmax all = warp_merge({maxima[threadIdx.x % 32], totals[threadIdx.x % 32]});
  if (threadIdx.x == 0) {
    losses[row] = static_cast<float>(log(static_cast<double>(all.total)) +
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

template <bool kGradient>
void launch(float* losses, void* logits, DType dtype, const ConstView& labels, int64_t width,
            double scale, Stream& stream) {
  for_cuda_type(dtype, "cross_entropy", [&](auto type) {
    using T = decltype(type);
    const auto run = [&]<int kWidth>() {
      row_kernel<T, kWidth, kGradient>
          <<<static_cast<unsigned>(labels.elements()), kRowThreads, 0, native(stream)>>>(
              losses, static_cast<T*>(logits), labels.as<int32_t>(), width,
              static_cast<float>(scale));
    };
    wide<T>(width, {logits}) ? run.template operator()<kWide<T>>() : run.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("cross_entropy");
}

}  // namespace

void cross_entropy(const View& losses, const View& logits, const ConstView& labels, double scale,
                   Stream& stream) {
  launch<true>(losses.as<float>(), logits.data, logits.dtype, labels, logits.dim(1), scale, stream);
}

void token_losses(const View& losses, const ConstView& logits, const ConstView& labels,
                  Stream& stream) {
  // Without kGradient the kernel does not write through the pointer.
  launch<false>(losses.as<float>(), const_cast<void*>(logits.data), logits.dtype, labels,
                logits.dim(1), 0, stream);
}

}  // namespace rowshard::cuda
