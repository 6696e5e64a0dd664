// Codes that a kernel writes beside its result are the bytes that the quantiser makes of that
// result.
#pragma once

#include "fp8/quantize.h"
#include "layer_test.h"
#include "test_device.h"

namespace rowshard::testing {

/// Every group of 1x128 its own magnitude, and a NaN.
inline Doubles groups_of_magnitudes(int64_t rows, int64_t width) {
  Doubles values = random_values(rows * width, 1);
  for (int64_t i = 0; i < rows * width; ++i)
    values[i] *= std::exp2((i / 128) % 7 * 3 - 9);
  values[0] = NAN;
  return values;
}

/// `forward(y, codes)` writes a [rows, width] result of `dtype` and its codes 1x128, either of them
/// or both: to y unless it has no data, and to *codes unless that is null. All bytes are compared,
/// padding of the scales included.
template <typename Forward>
void expect_fused_codes(Bench& bench, DType dtype, int64_t rows, int64_t width, Forward forward) {
  const auto make = [&](DType type, Shape shape) {
    return bench.arena.tensor(Category::kActivations, "test", type, shape);
  };
  const Shape scales = gemm_scale_shape(Grouping::k1x128, rows, width);
  const Tensor y = make(dtype, {rows, width}), y2 = make(dtype, y.shape());
  const Tensor codes[3] = {make(DType::kE4M3, y.shape()), make(DType::kE4M3, y.shape()),
                           make(DType::kE4M3, y.shape())};
  const Tensor scale[3] = {make(DType::kF32, scales), make(DType::kF32, scales),
                           make(DType::kF32, scales)};
  Fp8View views[3];
  for (int i = 0; i < 3; ++i)
    views[i] = {codes[i], scale[i], Grouping::k1x128};
  forward(y.view(), nullptr);
  quantize(&views[0], nullptr, y, {}, bench.stream);
  forward(y2.view(), &views[1]);
  forward(View(), &views[2]);
  EXPECT_EQ(bench.download<uint8_t>(y2), bench.download<uint8_t>(y));
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(bench.download<uint8_t>(codes[i]), bench.download<uint8_t>(codes[0]));
    EXPECT_EQ(bench.download<float>(scale[i]), bench.download<float>(scale[0]));
  }
}

}  // namespace rowshard::testing
