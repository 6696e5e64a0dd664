// Runs of a matrix quantised apart are the matrix quantised whole.
#include "fp8/range_quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;

TEST(RangeQuantize, RunsCutAnywhereAreTheWhole) {
  Bench bench;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{300, 200}, {128, 128}, {3, 129}}) {
    std::vector<float> values(rows * cols);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const int64_t row = i / cols, col = i % cols;
      values[i] = std::ldexp(static_cast<float>((i * 7919) % 251 - 125),
                             static_cast<int>(row / 128 * 3 + col / 128 * 5) - 9);
    }
    values[0] = 0;
    if (rows > 256) {  // a block of zeros, a NaN, an infinity
      for (int64_t i = 256 * cols; i < rows * cols; ++i)
        values[i] = i % cols < 128 ? 0.0f : values[i];
      values[5] = std::numeric_limits<float>::quiet_NaN();
      values[130 * cols + 3] = std::numeric_limits<float>::infinity();
    }
    const Tensor whole = bench.upload(values, {rows, cols});
    for (const bool power_of_two : {true, false}) {
      QuantizeOptions options;
      options.power_of_two = power_of_two;
      const Shape scale_shape = gemm_scale_shape(Grouping::k128x128, rows, cols);
      const Tensor codes =
          bench.arena.tensor(Category::kWorkspace, "codes", DType::kE4M3, {rows, cols});
      const Tensor scales =
          bench.arena.tensor(Category::kWorkspace, "scales", DType::kF32, scale_shape);
      const Fp8View wanted{codes, scales, Grouping::k128x128};
      quantize(&wanted, nullptr, whole, options, bench.stream);

      const std::vector<int64_t> cuts{
          0, 1, rows * cols / 3, rows * cols / 3, rows * cols - 1, rows * cols};
      const Tensor amax = bench.arena.tensor(Category::kWorkspace, "amax", DType::kF32,
                                             {ceil_div(rows, 128), ceil_div(cols, 128)});
      fill_bytes(amax, 0, bench.stream);
      const Tensor got =
          bench.arena.tensor(Category::kWorkspace, "got", DType::kE4M3, {rows * cols});
      const View flat = whole.view().reshape({rows * cols});
      const auto each_run = [&](const auto& call) {
        for (size_t r = 0; r + 1 < cuts.size(); ++r)
          call(cuts[r], cuts[r + 1] - cuts[r]);
      };
      each_run([&](int64_t first, int64_t count) {
        range_amax(amax, flat.slice_rows(first, count), first, cols, bench.stream);
      });
      each_run([&](int64_t first, int64_t count) {
        range_encode(got.view().slice_rows(first, count), flat.slice_rows(first, count), first,
                     cols, amax, options, bench.stream);
      });
      const Tensor got_scales =
          bench.arena.tensor(Category::kWorkspace, "got scales", DType::kF32, scale_shape);
      block_scales(got_scales, amax, options, bench.stream);
      EXPECT_EQ(bench.download<uint8_t>(got), bench.download<uint8_t>(codes))
          << rows << "x" << cols << " power of two " << power_of_two;
      EXPECT_EQ(bench.download<uint8_t>(got_scales), bench.download<uint8_t>(scales));
      EXPECT_THROW(range_amax(amax, flat, rows * cols + 128 * cols, cols, bench.stream),
                   ShapeError);
    }
  }
}

}  // namespace
}  // namespace rowshard
