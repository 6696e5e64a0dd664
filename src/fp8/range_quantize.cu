#include "core/cuda_check.h"
#include "fp8/formats.h"
#include "fp8/range_quantize.h"

namespace rowshard::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;  // consecutive elements of a thread: mostly of one block of the matrix

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(ceil_div(threads, int64_t{kThreads}));
}

__global__ void amax_kernel(float* amax, const float* values, int64_t count, int64_t first,
                            int64_t cols, int64_t width) {
  const int64_t begin = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kRun;
  const int64_t end = min(begin + kRun, count);
  int64_t block = -1;
  float largest = 0;
  // Not negative, so that the order of the bits is the order of the numbers.
  const auto flush = [&] {
    if (block >= 0 && largest > amax[block])
      atomicMax(reinterpret_cast<int*>(amax + block), __float_as_int(largest));
  };
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = (first + i) / cols / 128 * width + (first + i) % cols / 128;
    if (at != block) {
      flush();
      block = at;
      largest = 0;
    }
    const float magnitude = fabsf(values[i]);
    if (magnitude > largest)  // false for NaN
      largest = magnitude;
  }
  flush();
}

__global__ void encode_kernel(uint8_t* codes, const float* values, int64_t count, int64_t first,
                              int64_t cols, const float* amax, int64_t width, bool power_of_two,
                              float epsilon) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count)
    return;
  const int64_t at = (first + i) / cols / 128 * width + (first + i) % cols / 128;
  const BlockScale scale =
      block_scale(amax[at], 448.0f, power_of_two, epsilon, largest_finite(DType::kF32));
  codes[i] = encode_e4m3(values[i] * scale.multiplier);
}

__global__ void scales_kernel(float* scales, const float* amax, int64_t count, int64_t stride,
                              int64_t width, bool power_of_two, float epsilon) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count)
    return;
  const int64_t row = i / stride, col = i % stride;
  scales[i] = col < width ? block_scale(amax[row * width + col], 448.0f, power_of_two, epsilon,
                                        largest_finite(DType::kF32))
                                .scale
                          : 1.0f;
}

}  // namespace

void range_amax(const View& amax, const ConstView& values, int64_t first, int64_t cols,
                Stream& stream) {
  const int64_t count = values.elements();
  amax_kernel<<<blocks_for(ceil_div(count, int64_t{kRun})), kThreads, 0, native(stream)>>>(
      amax.as<float>(), values.as<float>(), count, first, cols, amax.dim(1));
  CUDA_CHECK_LAUNCH("range_amax");
}

void range_encode(const View& codes, const ConstView& values, int64_t first, int64_t cols,
                  const ConstView& amax, const QuantizeOptions& options, Stream& stream) {
  const int64_t count = values.elements();
  encode_kernel<<<blocks_for(count), kThreads, 0, native(stream)>>>(
      reinterpret_cast<uint8_t*>(codes.byte_data()), values.as<float>(), count, first, cols,
      amax.as<float>(), amax.dim(1), options.power_of_two, options.amax_epsilon);
  CUDA_CHECK_LAUNCH("range_encode");
}

void block_scales(const View& scales, const ConstView& amax, const QuantizeOptions& options,
                  Stream& stream) {
  scales_kernel<<<blocks_for(scales.elements()), kThreads, 0, native(stream)>>>(
      scales.as<float>(), amax.as<float>(), scales.elements(), scales.dim(1), amax.dim(1),
      options.power_of_two, options.amax_epsilon);
  CUDA_CHECK_LAUNCH("block_scales");
}

}  // namespace rowshard::cuda
