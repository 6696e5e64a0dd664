#include "fp8/quantize.h"

#include <gtest/gtest.h>

#include "fp8_test_data.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::difference;
using testing::download;
using testing::Fp8Bytes;
using testing::Fp8Tensor;

struct Dims {
  int64_t rows, cols;
};

constexpr DType kInputs[] = {DType::kF32, DType::kBF16, DType::kF16};

// One quantisation of all asked copies, against the rule element by element, padding included.
void expect_by_the_book(std::vector<float> x, Dims dims, Grouping grouping, DType dtype,
                        const QuantizeOptions& options, bool rowwise, bool columnwise) {
  Bench bench;
  const auto [rows, cols] = dims;
  Tensor input = upload_as(bench, x, dtype, {rows, cols});
  Fp8Tensor row(bench, grouping, rows, cols, options.format);
  Fp8Tensor col(bench, grouping, cols, rows, options.format);
  const Fp8View row_view = row.view(), col_view = col.view();
  quantize(rowwise ? &row_view : nullptr, columnwise ? &col_view : nullptr, input, options,
           bench.stream);
  const std::string what =
      message(to_string(grouping), " of ", to_string(dtype), " ", Shape{rows, cols}, " as ",
              to_string(options.format), options.power_of_two ? "" : ", any scale",
              rowwise && columnwise ? ", both copies" : "");
  if (rowwise) {
    const Fp8Bytes wanted = testing::quantize_by_the_book(x, rows, cols, grouping, dtype, options);
    const Fp8Bytes got = download(bench, row_view);
    EXPECT_EQ(difference(got.scales, wanted.scales), "equal") << what << ", rowwise scales";
    EXPECT_EQ(difference(got.codes, wanted.codes), "equal") << what << ", rowwise codes";
  }
  if (columnwise) {
    const Fp8Bytes wanted = testing::quantize_by_the_book(testing::transposed(x, rows, cols), cols,
                                                          rows, grouping, dtype, options);
    const Fp8Bytes got = download(bench, col_view);
    EXPECT_EQ(difference(got.scales, wanted.scales), "equal") << what << ", columnwise scales";
    EXPECT_EQ(difference(got.codes, wanted.codes), "equal") << what << ", columnwise codes";
  }
}

class Quantize : public ::testing::TestWithParam<Grouping> {};

TEST_P(Quantize, ManyShapes) {
  const Dims shapes[] = {{1, 1},     {1, 128},   {128, 1},  {3, 5},     {31, 33},   {32, 32},
                         {64, 128},  {127, 129}, {128, 96}, {129, 127}, {128, 128}, {300, 300},
                         {256, 384}, {257, 16},  {16, 257}, {40, 264},  {136, 272}};
  int i = 0;
  for (const Dims dims : shapes) {
    QuantizeOptions options;
    options.format = i % 3 == 2 ? Fp8Format::kE5M2 : Fp8Format::kE4M3;
    options.power_of_two = i % 2 == 0 || is_mx(GetParam());
    const DType dtype = kInputs[i++ % 3];
    expect_by_the_book(testing::many_scales(dims.rows, dims.cols, i), dims, GetParam(), dtype,
                       options, true, true);
    expect_by_the_book(testing::many_scales(dims.rows, dims.cols, i), dims, GetParam(), dtype,
                       options, true, false);
    expect_by_the_book(testing::many_scales(dims.rows, dims.cols, i), dims, GetParam(), dtype,
                       options, false, true);
  }
}

TEST_P(Quantize, EveryInputFormatAndOption) {
  const Dims dims{144, 272};
  for (const DType dtype : kInputs) {
    for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
      for (const bool power_of_two : {true, false}) {
        QuantizeOptions options;
        options.format = format;
        options.power_of_two = power_of_two;
        expect_by_the_book(testing::many_scales(dims.rows, dims.cols, 9), dims, GetParam(), dtype,
                           options, true, true);
      }
    }
  }
}

TEST_P(Quantize, ZeroTinyHugeInfiniteAndNanBlocks) {
  for (const Dims dims : {Dims{288, 384}, Dims{97, 203}}) {
    for (const DType dtype : kInputs) {
      for (const bool power_of_two : {true, false}) {
        QuantizeOptions options;
        options.power_of_two = power_of_two;
        expect_by_the_book(testing::edge_blocks(dims.rows, dims.cols, dtype), dims, GetParam(),
                           dtype, options, true, true);
      }
    }
  }
}

TEST_P(Quantize, EveryMagnitude) {
  for (const double magnitude : {1e-42, 1e-36, 1e-28, 1e-3, 1e3, 1e30}) {
    expect_by_the_book(testing::many_scales(130, 260, 3, magnitude), {130, 260}, GetParam(),
                       DType::kF32, {}, true, true);
  }
}

TEST_P(Quantize, SkipFlagChangesNothing) {
  Bench bench;
  std::vector<float> x = testing::many_scales(160, 256, 1);
  Tensor input = bench.upload(x, {160, 256});
  for (const float flag : {1.0f, 0.0f}) {
    Fp8Tensor row(bench, GetParam(), 160, 256), col(bench, GetParam(), 256, 160);
    const Fp8View row_view = row.view(), col_view = col.view();
    for (const Tensor* part : {&row.codes, &row.scales, &col.codes, &col.scales}) {
      fill_bytes(*part, 0xa5, bench.stream);
    }
    Tensor skip = bench.upload(std::vector<float>{flag}, {1});
    QuantizeOptions options;
    options.skip = skip.as<float>();
    quantize(&row_view, &col_view, input, options, bench.stream);
    for (const ConstView part : {ConstView(row.codes), ConstView(row.scales), ConstView(col.codes),
                                 ConstView(col.scales)}) {
      const auto bytes = bench.download<uint8_t>(part);
      const bool untouched =
          std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0xa5; });
      EXPECT_EQ(untouched, flag == 1.0f) << describe(part);
    }
  }
}

TEST_P(Quantize, EmptyMatrices) {
  Bench bench;
  for (const Dims dims : {Dims{0, 128}, Dims{128, 0}}) {
    Tensor input =
        bench.arena.tensor(Category::kActivations, "x", DType::kF32, {dims.rows, dims.cols});
    Fp8Tensor row(bench, GetParam(), dims.rows, dims.cols);
    const Fp8View view = row.view();
    EXPECT_NO_THROW(quantize(&view, nullptr, input, {}, bench.stream));
  }
}

TEST_P(Quantize, DequantizeIsCodeTimesScale) {
  Bench bench;
  const int64_t rows = 150, cols = 290;
  std::vector<float> x = testing::many_scales(rows, cols, 2);
  Tensor input = bench.upload(x, {rows, cols});
  for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
    Fp8Tensor row(bench, GetParam(), rows, cols, format);
    const Fp8View view = row.view();
    QuantizeOptions options;
    options.format = format;
    quantize(&view, nullptr, input, options, bench.stream);
    Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {rows, cols});
    dequantize(y, view, bench.stream);
    const auto got = bench.download<float>(y);
    // Half a unit in the last place of a normal code, or of the block's subnormal step.
    const double relative = format == Fp8Format::kE4M3 ? 1.0 / 16 : 1.0 / 8;
    const double step = format == Fp8Format::kE4M3 ? 0x1p-9 : 0x1p-16;
    const auto codes = bench.download<uint8_t>(row.codes);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const float code_value = decode_table(format)[codes[i]];
      const double scale = code_value == 0 ? 0 : got[i] / code_value;
      if (code_value != 0) {
        int exponent;
        EXPECT_EQ(std::frexp(scale, &exponent), 0.5) << "a scale that is no power of two at " << i;
        EXPECT_LE(std::abs(got[i] - x[i]), std::max(relative * std::abs(x[i]), step / 2 * scale));
      }
    }
    // The same values narrowed.
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Tensor narrow = bench.arena.tensor(Category::kActivations, "y", dtype, {rows, cols});
      dequantize(narrow, view, bench.stream);
      const auto bits = bench.download<uint16_t>(narrow);
      for (int64_t i = 0; i < rows * cols; ++i) {
        EXPECT_EQ(bits[i], dtype == DType::kBF16 ? bf16(got[i]).bits : f16(got[i]).bits) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllGroupings, Quantize, ::testing::ValuesIn(testing::kGroupings),
                         [](const auto& info) {
                           std::string name = to_string(info.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST(QuantizeErrors, AreNamed) {
  Bench bench;
  Tensor x = bench.upload(std::vector<float>(64 * 256, 1.0f), {64, 256});
  Fp8Tensor row(bench, Grouping::k1x128, 64, 256), col(bench, Grouping::k1x128, 256, 64);
  Fp8Tensor mx(bench, Grouping::kMx1x32, 256, 64);
  const Fp8View row_view = row.view(), col_view = col.view(), mx_view = mx.view();
  // The copies swapped, two groupings, scales of another grouping, the wrong format.
  EXPECT_THROW(quantize(&col_view, &row_view, x, {}, bench.stream), ShapeError);
  EXPECT_THROW(quantize(&row_view, &mx_view, x, {}, bench.stream), ShapeError);
  Fp8View wrong = row_view;
  wrong.grouping = Grouping::k128x128;
  EXPECT_THROW(quantize(&wrong, nullptr, x, {}, bench.stream), ShapeError);
  QuantizeOptions e5m2;
  e5m2.format = Fp8Format::kE5M2;
  EXPECT_THROW(quantize(&row_view, nullptr, x, e5m2, bench.stream), ShapeError);
  QuantizeOptions epsilon;
  epsilon.amax_epsilon = 1e-3f;
  EXPECT_THROW(quantize(nullptr, &mx_view, x, epsilon, bench.stream), ConfigError);
  EXPECT_NO_THROW(quantize(&row_view, nullptr, x, epsilon, bench.stream));
}

TEST(QuantizeOptionsTest, AmaxEpsilonIsALowerBound) {
  QuantizeOptions options;
  options.amax_epsilon = 0.125f;
  for (const Grouping grouping : {Grouping::k1x128, Grouping::k128x128}) {
    expect_by_the_book(testing::many_scales(150, 150, 4, 0.01), {150, 150}, grouping, DType::kBF16,
                       options, true, true);
  }
}

}  // namespace
}  // namespace rowshard
