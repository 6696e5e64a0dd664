#include "fp8/gemm.h"

#include <cblas.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "fp8_test_data.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Fp8Bytes;
using testing::Fp8Tensor;

struct Operand {
  Fp8Bytes bytes;  // on the host, for the oracle
  std::vector<float> values;
  Grouping grouping;
  Fp8Format format;
  int64_t outer, inner;

  Operand(int64_t outer_, int64_t inner_, Grouping grouping_, uint64_t seed, double magnitude = 1,
          Fp8Format format_ = Fp8Format::kE4M3)
      : grouping(grouping_), format(format_), outer(outer_), inner(inner_) {
    QuantizeOptions options;
    options.format = format;
    bytes = testing::quantize_by_the_book(testing::many_scales(outer, inner, seed, magnitude),
                                          outer, inner, grouping, DType::kF32, options);
    values.resize(outer * inner);
    Stream stream(kHost);
    dequantize(View(values.data(), DType::kF32, {outer, inner}, kHost), view(), stream);
  }
  ConstFp8View view() const {
    return {ConstView(bytes.codes.data(), dtype_of(format), {outer, inner}, kHost),
            ConstView(bytes.scales.data(), scale_dtype(grouping),
                      gemm_scale_shape(grouping, outer, inner), kHost),
            grouping};
  }
  /// The same on the device under test.
  Fp8Tensor upload(Bench& bench) const {
    Fp8Tensor tensor(bench, grouping, outer, inner, format);
    copy(tensor.codes, view().codes, bench.stream);
    copy(tensor.scales, view().scales, bench.stream);
    bench.stream.synchronize();
    return tensor;
  }
};

double value_of(DType dtype, const uint8_t* data, int64_t i) {
  switch (dtype) {
    case DType::kF32:
      return reinterpret_cast<const float*>(data)[i];
    case DType::kBF16:
      return static_cast<float>(reinterpret_cast<const bf16*>(data)[i]);
    default:
      return static_cast<float>(reinterpret_cast<const f16*>(data)[i]);
  }
}

// Runs the product of given_x and given_w on the device under test and counts the elements that are
// further from the oracle's product of x and w than the bound. The bound per element: both sum K
// terms in f32, in different orders (tensor cores keep at least 13 bits below the largest term of a
// block), then round once to y's dtype.
int64_t elements_off(const Operand& x, const Operand& w, const Operand& given_x,
                     const Operand& given_w, DType dtype, bool with_bias, float beta) {
  Bench bench;
  const int64_t m = x.outer, n = w.outer, k = x.inner;
  std::vector<float> bias_values = testing::many_scales(1, n, 11);
  std::vector<float> start = testing::many_scales(m, n, 12);
  Tensor y = upload_as(bench, start, dtype, {m, n});
  const DType bias_dtype = dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  Tensor bias = upload_as(bench, bias_values, bias_dtype, {n});
  std::vector<uint8_t> wanted = bench.download<uint8_t>(y);
  const std::vector<uint8_t> host_bias = bench.download<uint8_t>(bias);

  GemmOptions options;
  options.beta = beta;
  GemmOptions host_options = options;
  if (with_bias) {
    options.bias = bias;
    host_options.bias = ConstView(host_bias.data(), bias_dtype, {n}, kHost);
  }
  Fp8Tensor x8 = given_x.upload(bench), w8 = given_w.upload(bench);
  fp8_gemm(y, x8.view(), w8.view(), options, bench.ctx);
  const std::vector<uint8_t> got = bench.download<uint8_t>(y);
  fp8_gemm_oracle(View(wanted.data(), dtype, {m, n}, kHost), x.view(), w.view(), host_options);

  const bool tensor_cores = bench.ctx.device().is_cuda();
  // Hopper's tensor cores add 32 products at a time, aligned to the largest of them, and drop what
  // lies below 13 bits of it: a product loses less than 2^-12 of the largest. So their sum is not
  // the f32 sum of the oracle, which they would have to equal for a tolerance of zero.
  const double sum_error = static_cast<double>(k + 8) * 0x1p-24;
  // Two roundings of nearly equal sums: one unit in the last place.
  const double store_error = dtype == DType::kF32    ? 0x1p-22
                             : dtype == DType::kBF16 ? 0x1p-7
                                                     : 0x1p-10;
  int64_t off = 0;
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t col = 0; col < n; ++col) {
      double magnitude = 0, dropped = 0;
      for (int64_t begin = 0; begin < k; begin += 32) {
        double largest = 0;
        for (int64_t i = begin; i < std::min(k, begin + 32); ++i) {
          const double product = std::abs(double{x.values[row * k + i]} * w.values[col * k + i]);
          magnitude += product;
          largest = std::max(largest, product);
        }
        dropped += tensor_cores ? 32 * 0x1p-12 * largest : 0;
      }
      const int64_t at = row * n + col;
      const double expected = value_of(dtype, wanted.data(), at);
      const double actual = value_of(dtype, got.data(), at);
      const double before =
          std::abs(start[at] * beta) + (with_bias ? std::abs(bias_values[col]) : 0);
      // An f16 result below 2^-14 has steps of 2^-24.
      const double bound =
          sum_error * magnitude + dropped +
          store_error * (std::abs(expected) + before + sum_error * magnitude + dropped) +
          (dtype == DType::kF16 ? 0x1p-24 : 0);
      off += !(std::abs(actual - expected) <= bound) && !(actual == expected);
    }
  }
  return off;
}

void expect_oracle(const Operand& x, const Operand& w, DType dtype, bool with_bias, float beta) {
  EXPECT_EQ(elements_off(x, w, x, w, dtype, with_bias, beta), 0)
      << "elements outside the bound: M, N, K " << Shape{x.outer, w.outer, x.inner} << " "
      << to_string(x.grouping) << " by " << to_string(w.grouping) << " as " << to_string(dtype)
      << (with_bias ? ", bias" : "") << ", beta " << beta;
}

struct Pair {
  Grouping x, w;
};
constexpr Pair kPairs[] = {
    {Grouping::k1x128, Grouping::k128x128}, {Grouping::k128x128, Grouping::k1x128},
    {Grouping::k1x128, Grouping::k1x128},   {Grouping::k128x128, Grouping::k128x128},
    {Grouping::kMx1x32, Grouping::kMx1x32}, {Grouping::kMx1x32, Grouping::kMx32x32}};

TEST(Gemm, EveryPairAndResult) {
  for (const Pair pair : kPairs) {
    const Operand x(48, 320, pair.x, 1, 0.01), w(72, 320, pair.w, 2, 0.01);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      expect_oracle(x, w, dtype, false, 0);
    }
    expect_oracle(x, w, DType::kBF16, true, 0);
    expect_oracle(x, w, DType::kF32, true, 1);
    expect_oracle(x, w, DType::kF32, false, 1);
    expect_oracle(x, w, DType::kF32, false, 0.5f);
  }
}

// The oracle stores results with the code of the host product, so what is added after the sum is
// checked by hand: with x = 0 the result is the bias, rounded, plus beta times what was there.
TEST(Gemm, BiasAndBetaByHand) {
  Bench bench;
  const int64_t m = 24, n = 136, k = 128;
  for (const Pair pair : kPairs) {
    Fp8Tensor x(bench, pair.x, m, k), w = Operand(n, k, pair.w, 2).upload(bench);
    const Fp8View x_view = x.view();
    const Tensor zeros = bench.upload(std::vector<float>(m * k, 0.0f), {m, k});
    quantize(&x_view, nullptr, zeros, {}, bench.stream);
    for (const float beta : {0.0f, 1.0f, -0.5f}) {
      std::vector<float> bias_values = testing::many_scales(1, n, 11);
      std::vector<float> start = testing::many_scales(m, n, 12);
      const Tensor bias = upload_as(bench, bias_values, DType::kBF16, {n});
      const Tensor y = upload_as(bench, start, DType::kBF16, {m, n});
      GemmOptions options;
      options.beta = beta;
      options.bias = bias;
      fp8_gemm(y, x.view(), w.view(), options, bench.ctx);
      const std::vector<uint16_t> got = bench.download<uint16_t>(y);
      int64_t off = 0;
      for (int64_t i = 0; i < m * n; ++i) {
        off += got[i] != bf16(bias_values[i % n] + beta * start[i]).bits;
      }
      EXPECT_EQ(off, 0) << to_string(pair.x) << " by " << to_string(pair.w) << ", beta " << beta;
    }
  }
}

TEST(Gemm, ShapesOfSmallModels) {
  for (const Shape mnk : {Shape{64, 576, 192}, Shape{33, 192, 576}, Shape{1, 576, 576},
                          Shape{7, 200, 144}, Shape{129, 136, 1536}, Shape{255, 64, 128}}) {
    expect_oracle({mnk[0], mnk[2], Grouping::k1x128, 3}, {mnk[1], mnk[2], Grouping::k128x128, 4},
                  DType::kF32, false, 0);
    expect_oracle({mnk[0], mnk[2], Grouping::k1x128, 3}, {mnk[1], mnk[2], Grouping::k1x128, 4},
                  DType::kF32, false, 0);
  }
}

TEST(Gemm, Magnitudes) {
  for (const double magnitude : {1e-28, 1.0, 1e3}) {
    expect_oracle({128, 128, Grouping::k1x128, 5, magnitude},
                  {128, 128, Grouping::k128x128, 6, 1.0}, DType::kF32, false, 0);
    expect_oracle({64, 384, Grouping::k128x128, 5, magnitude}, {128, 384, Grouping::k1x128, 6, 1.0},
                  DType::kF32, false, 0);
  }
}

TEST(Gemm, GradientsInE5M2) {
  const Operand dy(32, 256, Grouping::k1x128, 1, 1e-3, Fp8Format::kE5M2);
  expect_oracle(dy, {64, 256, Grouping::k128x128, 2}, DType::kF32, false, 0);
}

// Odd sizes: the host takes any, cuda says what does not fit.
TEST(Gemm, PartialEverything) {
  if (!testing::test_device.is_host()) {
    GTEST_SKIP() << "cuBLASLt needs K % 16 = 0 and N % 8 = 0; see Gemm.IllegalOnCuda";
  }
  for (const Pair pair : kPairs) {
    expect_oracle({5, 301, pair.x, 1}, {13, 301, pair.w, 2}, DType::kF32, true, 1);
    expect_oracle({3, 7, pair.x, 1}, {1, 7, pair.w, 2}, DType::kBF16, false, 0);
  }
}

TEST(Gemm, IllegalOnCuda) {
  if (testing::test_device.is_host()) {
    GTEST_SKIP() << "limits of cuBLASLt";
  }
  Bench bench;
  const auto attempt = [&](int64_t n, int64_t k, bool f32_bias) {
    Fp8Tensor x(bench, Grouping::k1x128, 16, k), w(bench, Grouping::k128x128, n, k);
    Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kBF16, {16, n});
    Tensor bias = bench.arena.tensor(Category::kActivations, "b", DType::kF32, {n});
    GemmOptions options;
    if (f32_bias) {
      options.bias = bias;
    }
    fp8_gemm(y, x.view(), w.view(), options, bench.ctx);
  };
  EXPECT_NO_THROW(attempt(128, 128, false));
  EXPECT_THROW(attempt(128, 120, false), ShapeError);
  EXPECT_THROW(attempt(252, 128, false), ShapeError);
  EXPECT_THROW(attempt(128, 128, true), ShapeError);
}

// A row's result must not depend on how many rows come with it.
TEST(Gemm, RowsDoNotSeeEachOther) {
  if (!testing::test_device.is_host()) {
    GTEST_SKIP() << "cuBLASLt may sum in another order for another M";
  }
  openblas_set_num_threads(1);  // threads share out rows by their number
  Bench bench;
  const int64_t m = 192, n = 136, k = 576;
  const Operand rows(m, k, Grouping::k1x128, 1);
  Fp8Tensor w8 = Operand(n, k, Grouping::k128x128, 2).upload(bench);
  Fp8Tensor x8 = rows.upload(bench);
  Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {m, n});
  fp8_gemm(y, x8.view(), w8.view(), {}, bench.ctx);
  const auto whole = bench.download<float>(y);
  for (const int64_t half : {1, 31, 64, 128}) {
    Fp8Tensor part(bench, Grouping::k1x128, half, k);
    std::vector<float> values = testing::many_scales(m, k, 1);
    values.resize(half * k);
    Tensor input = bench.upload(values, {half, k});
    const Fp8View view = part.view();
    quantize(&view, nullptr, input, {}, bench.stream);
    Tensor part_y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {half, n});
    fp8_gemm(part_y, view, w8.view(), {}, bench.ctx);
    auto wanted = whole;
    wanted.resize(half * n);
    EXPECT_TRUE(bench.download<float>(part_y) == wanted) << half << " of " << m << " rows";
  }
}

// Scales of another row or block, or written as if rows were not padded, must show in the product.
TEST(Gemm, MisplacedScalesShow) {
  const int64_t m = 37, n = 136, k = 640;  // 5 blocks of K and 37 rows: both paddings matter
  const Operand x(m, k, Grouping::k1x128, 1), w(n, k, Grouping::k128x128, 2);
  const Operand mx(m, k, Grouping::kMx1x32, 1), mx_w(n, k, Grouping::kMx32x32, 2);
  const auto expect_off = [](const Operand& x, const Operand& w, const Operand& wrong_x,
                             const Operand& wrong_w, const char* what) {
    const int64_t off = elements_off(x, w, wrong_x, wrong_w, DType::kF32, false, 0);
    EXPECT_GT(off, x.outer * w.outer / 20) << what;
  };
  ASSERT_EQ(elements_off(x, w, x, w, DType::kF32, false, 0), 0);
  const auto floats = [](Operand& operand) {
    return reinterpret_cast<float*>(operand.bytes.scales.data());
  };
  // Rows of scales written with the stride of the unpadded matrix.
  const auto unpadded = [&](Operand operand, int64_t rows, int64_t valid, int64_t stride) {
    float* scales = floats(operand);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(scales + r * stride, valid, scales + r * valid);
    }
    std::fill(scales + rows * valid, scales + rows * stride, 1.0f);
    return operand;
  };
  expect_off(x, w, x, unpadded(w, 2, 5, 8), "w: rows of 5 scales not padded to 8");
  expect_off(x, w, unpadded(x, 5, 37, 40), w, "x: rows of 37 scales not padded to 40");
  Operand moved = w;
  std::rotate(floats(moved), floats(moved) + 1, floats(moved) + 5);
  expect_off(x, w, x, moved, "w: every scale one block early");
  moved = x;
  std::rotate(floats(moved), floats(moved) + 1, floats(moved) + 37);
  expect_off(x, w, moved, w, "x: every scale of the first block one row early");
  moved = mx;
  std::rotate(moved.bytes.scales.begin(), moved.bytes.scales.begin() + 1, moved.bytes.scales.end());
  expect_off(mx, mx_w, moved, mx_w, "x mx: every scale one group early");
  moved = mx_w;
  std::rotate(moved.bytes.scales.begin(), moved.bytes.scales.begin() + 1, moved.bytes.scales.end());
  expect_off(mx, mx_w, mx, moved, "w mx: every scale one group early");

  // Said by shape, where a shape can say it.
  Bench bench;
  Fp8Tensor x8 = x.upload(bench), w8 = w.upload(bench);
  Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {m, n});
  Fp8View wrong = w8.view();
  wrong.scales = View(wrong.scales.data, DType::kF32, {2, 5}, wrong.scales.device);
  EXPECT_THROW(fp8_gemm(y, x8.view(), wrong, {}, bench.ctx), ShapeError);
  wrong = x8.view();
  wrong.scales = View(wrong.scales.data, DType::kF32, {5, 37}, wrong.scales.device);
  EXPECT_THROW(fp8_gemm(y, wrong, w8.view(), {}, bench.ctx), ShapeError);
}

// The plan device takes the scratch that the device under test takes, to the byte.
TEST(Gemm, PlanCountsTheScratch) {
  for (const Pair pair : kPairs) {
    for (const int64_t m : {64, 37}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const auto peak = [&](Device device) {
          Arena arena(device);
          Stream stream(device);
          Context ctx{arena, stream};
          const auto operand = [&](Grouping grouping, int64_t outer, int64_t inner) {
            return std::pair{
                arena.tensor(Category::kActivations, "codes", DType::kE4M3, {outer, inner}),
                arena.tensor(Category::kScales, "scales", scale_dtype(grouping),
                             gemm_scale_shape(grouping, outer, inner))};
          };
          const auto [x, x_scales] = operand(pair.x, m, 256);
          const auto [w, w_scales] = operand(pair.w, 72, 256);
          const Tensor y = arena.tensor(Category::kActivations, "y", dtype, {m, 72});
          fp8_gemm(y, {x, x_scales, pair.x}, {w, w_scales, pair.w}, {}, ctx);
          stream.synchronize();
          return arena.bytes(Category::kWorkspace).peak;
        };
        const int64_t planned = peak({DeviceKind::kPlan, testing::test_device.is_cuda() ? 1 : 0});
        EXPECT_EQ(planned, peak(testing::test_device))
            << to_string(pair.x) << " by " << to_string(pair.w) << ", M " << m;
        const bool ours = pair.x == Grouping::k1x128 && pair.w == Grouping::k128x128;
        EXPECT_TRUE(planned > 0 || (testing::test_device.is_cuda() && ours)) << "no scratch";
      }
    }
  }
}

TEST(GemmErrors, AreNamed) {
  Bench bench;
  Fp8Tensor x(bench, Grouping::k1x128, 16, 128), w(bench, Grouping::k128x128, 32, 128);
  Fp8Tensor mx(bench, Grouping::kMx1x32, 32, 128), short_w(bench, Grouping::k128x128, 32, 96);
  Fp8Tensor x5(bench, Grouping::k1x128, 16, 128, Fp8Format::kE5M2);
  Fp8Tensor w5(bench, Grouping::k128x128, 32, 128, Fp8Format::kE5M2);
  Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {16, 32});
  Tensor yt = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {32, 16});
  EXPECT_NO_THROW(fp8_gemm(y, x.view(), w.view(), {}, bench.ctx));
  EXPECT_THROW(fp8_gemm(yt, x.view(), w.view(), {}, bench.ctx), ShapeError);
  EXPECT_THROW(fp8_gemm(y, x.view(), short_w.view(), {}, bench.ctx), ShapeError);
  EXPECT_THROW(fp8_gemm(y, x.view(), mx.view(), {}, bench.ctx), ShapeError);
  EXPECT_THROW(fp8_gemm(y, x5.view(), w5.view(), {}, bench.ctx), ShapeError);
  GemmOptions options;
  options.bias = ConstView(y.view().slice_rows(0, 1));
  EXPECT_THROW(fp8_gemm(y, x.view(), w.view(), options, bench.ctx), ShapeError);
  try {
    fp8_gemm(yt, x.view(), w.view(), {}, bench.ctx);
  } catch (const ShapeError& error) {
    EXPECT_NE(std::string(error.what()).find("[32, 16]"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace rowshard
