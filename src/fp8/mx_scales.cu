#include <algorithm>

#include "core/cuda_check.h"
#include "fp8/mx_scales.h"

namespace rowshard::cuda {
namespace {

constexpr int kThreads = 128;

// One thread the four groups of a row of a tile: one word of the result.
__global__ void swizzle_kernel(uint32_t* to, const uint8_t* from, int64_t words, int64_t outer,
                               int64_t groups, int64_t tiles_in_a_row, int rows_a_scale) {
  const int64_t word = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (word >= words)
    return;
  const int64_t tile = word / 128;
  const int in_tile = static_cast<int>(word % 128);
  const int64_t row = tile / tiles_in_a_row * 128 + in_tile % 4 * 32 + in_tile / 4;
  const int64_t first = tile % tiles_in_a_row * 4;
  uint32_t four = 0;
  if (row < outer) {
    const uint8_t* scales = from + row / rows_a_scale * groups;
    for (int g = 0; g < 4; ++g) {
      if (first + g < groups)
        four |= uint32_t{scales[first + g]} << (8 * g);
    }
  }
  to[word] = four;
}

}  // namespace

void swizzle_mx_scales(const View& y, const ConstFp8View& x, Stream& stream) {
  const int64_t words = y.elements() / 4;
  swizzle_kernel<<<ceil_div(words, kThreads), kThreads, 0, native(stream)>>>(
      reinterpret_cast<uint32_t*>(y.as<uint8_t>()), static_cast<const uint8_t*>(x.scales.data),
      words, x.outer(), x.scales.dim(1), y.dim(1) / 4, static_cast<int>(outer_block(x.grouping)));
  CUDA_CHECK_LAUNCH("swizzle_mx_scales");
}

}  // namespace rowshard::cuda
