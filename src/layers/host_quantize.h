// One row of 1×128 e4m3 groups, for host operations that quantise what they have just computed: the
// same bytes as fp8/quantize.h, whose scale rule and encoder it uses.
#pragma once

#include <algorithm>
#include <cmath>

#include "fp8/fp8_view.h"

namespace rowshard::host {

/// Codes and scales of row `row` of y8 [rows, width] from `values`, padding of the scales included.
template <typename T>
void quantize_row(const Fp8View& y8, int64_t row, const T* values) {
  const int64_t width = y8.inner(), rows = y8.outer(), stride = y8.scales.dim(1);
  auto* codes = static_cast<uint8_t*>(y8.codes.data) + row * width;
  float* scales = y8.scales.as<float>() + row;
  for (int64_t begin = 0; begin < width; begin += 128) {
    const int64_t end = std::min(begin + 128, width);
    float amax = 0;
    for (int64_t i = begin; i < end; ++i)
      amax = std::fmax(amax, std::fabs(static_cast<float>(widen(values[i]))));  // leaves NaN out
    const BlockScale scale =
        block_scale(amax, fp8_max(Fp8Format::kE4M3), true, 0, largest_finite(DTypeOf<T>::value));
    for (int64_t i = begin; i < end; ++i)
      codes[i] = encode_e4m3(static_cast<float>(widen(values[i])) * scale.multiplier);
    float* to = scales + begin / 128 * stride;
    *to = scale.scale;
    if (row == rows - 1)
      std::fill(to + 1, to + (stride - row), 1.0f);
  }
}

}  // namespace rowshard::host
