// The MX product of compute capability 10 cannot run on the GPUs at hand. What can be tested of it
// is: where its scales go, byte for byte, and when it is chosen.
#include <gtest/gtest.h>

#include <numeric>

#include "core/error.h"
#include "fp8/gemm_path.h"
#include "fp8/mx_scales.h"
#include "fp8_test_data.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::difference;
using testing::Fp8Tensor;

/// The layout as a walk over the result: tiles of 512 bytes, in a tile 32 lines of 16 bytes, in a
/// line four rows that are 32 apart, of each row four groups.
std::vector<uint8_t> swizzled_by_the_book(const std::vector<uint8_t>& scales, Grouping grouping,
                                          int64_t outer, int64_t inner) {
  const int64_t groups = ceil_div(inner, 32);
  std::vector<uint8_t> result;
  for (int64_t tile_row = 0; tile_row < ceil_div(outer, 128); ++tile_row) {
    for (int64_t tile_column = 0; tile_column < ceil_div(groups, 4); ++tile_column) {
      for (int64_t line = 0; line < 32; ++line) {
        for (int64_t quarter = 0; quarter < 4; ++quarter) {
          for (int64_t g = 0; g < 4; ++g) {
            const int64_t row = tile_row * 128 + quarter * 32 + line, group = tile_column * 4 + g;
            const int64_t scale_row = grouping == Grouping::kMx32x32 ? row / 32 : row;
            result.push_back(row < outer && group < groups ? scales[scale_row * groups + group]
                                                           : 0);
          }
        }
      }
    }
  }
  return result;
}

TEST(MxScales, SwizzledByteForByte) {
  for (const Grouping grouping : {Grouping::kMx1x32, Grouping::kMx32x32}) {
    for (const auto& [outer, inner] : {std::pair<int64_t, int64_t>{128, 128},
                                       {1, 1},
                                       {1, 32},
                                       {129, 160},
                                       {256, 512},
                                       {300, 416},
                                       {64, 96},
                                       {127, 131},
                                       {513, 33}}) {
      Bench bench;
      Fp8Tensor x(bench, grouping, outer, inner);
      // Every scale its own value, as far as bytes go; 251 is prime, so no row repeats.
      std::vector<uint8_t> scales(x.scales.view().bytes());
      for (size_t i = 0; i < scales.size(); ++i) {
        scales[i] = static_cast<uint8_t>(1 + i % 251);
      }
      copy(x.scales, ConstView(scales.data(), DType::kE8M0, x.scales.shape(), kHost), bench.stream);
      const Tensor y = bench.arena.tensor(Category::kWorkspace, "y", DType::kU8,
                                          swizzled_scale_shape(outer, inner));
      swizzle_mx_scales(y, x.view(), bench.stream);
      EXPECT_EQ(difference(bench.download<uint8_t>(y),
                           swizzled_by_the_book(scales, grouping, outer, inner)),
                "equal")
          << to_string(grouping) << " " << Shape{outer, inner};
    }
  }
}

// From the manual's definition: byte (outer % 32) · 16 + (outer / 32) · 4 + inner of a tile.
TEST(MxScales, KnownPlaces) {
  Bench bench;
  Fp8Tensor x(bench, Grouping::kMx1x32, 256, 256);  // 8 groups: 2 × 2 tiles
  std::vector<uint8_t> scales(256 * 8, 7);
  scales[0 * 8 + 0] = 100;
  scales[0 * 8 + 3] = 101;
  scales[1 * 8 + 0] = 102;
  scales[32 * 8 + 0] = 103;
  scales[127 * 8 + 3] = 104;
  scales[0 * 8 + 4] = 105;
  scales[128 * 8 + 0] = 106;
  copy(x.scales, ConstView(scales.data(), DType::kE8M0, x.scales.shape(), kHost), bench.stream);
  const Tensor y =
      bench.arena.tensor(Category::kWorkspace, "y", DType::kU8, swizzled_scale_shape(256, 256));
  swizzle_mx_scales(y, x.view(), bench.stream);
  const auto got = bench.download<uint8_t>(y);
  EXPECT_EQ(got[0], 100);
  EXPECT_EQ(got[3], 101);
  EXPECT_EQ(got[16], 102);
  EXPECT_EQ(got[4], 103);
  EXPECT_EQ(got[31 * 16 + 3 * 4 + 3], 104);
  EXPECT_EQ(got[512], 105);
  EXPECT_EQ(got[1024], 106);
  EXPECT_EQ(std::count(got.begin(), got.end(), 7), 256 * 8 - 7);
}

TEST(MxScales, ErrorsAreNamed) {
  Bench bench;
  Fp8Tensor mx(bench, Grouping::kMx1x32, 128, 128), block(bench, Grouping::k128x128, 128, 128);
  const auto result = [&](DType dtype, Shape shape) {
    return bench.arena.tensor(Category::kWorkspace, "y", dtype, shape);
  };
  const Tensor right = result(DType::kU8, {128, 4});
  EXPECT_NO_THROW(swizzle_mx_scales(right, mx.view(), bench.stream));
  EXPECT_THROW(swizzle_mx_scales(right, block.view(), bench.stream), ShapeError);
  EXPECT_THROW(swizzle_mx_scales(result(DType::kU8, {128, 8}), mx.view(), bench.stream),
               ShapeError);
  EXPECT_THROW(swizzle_mx_scales(result(DType::kE8M0, {128, 4}), mx.view(), bench.stream),
               ShapeError);
}

TEST(ChooseGemm, ByCapabilityGroupingsAndSizes) {
  using enum Grouping;
  const auto path = [](int capability, Grouping x, Grouping w, int64_t n = 64, int64_t k = 256) {
    return choose_gemm(capability, x, w, n, k).path;
  };
  for (const auto& [x, w] : {std::pair{k1x128, k128x128}, {k128x128, k1x128}, {k1x128, k1x128}}) {
    EXPECT_EQ(path(90, x, w), GemmPath::kBlockScaled);
    // An illegal size is that product's error to name, not a reason to take a slower one.
    EXPECT_EQ(path(90, x, w, 63, 250), GemmPath::kBlockScaled);
    for (const int other : {80, 89, 100, 103, 120}) {
      EXPECT_EQ(path(other, x, w), GemmPath::kWidened) << other;
    }
  }
  for (const int capability : {90, 100, 120}) {
    EXPECT_EQ(path(capability, k128x128, k128x128), GemmPath::kWidened);
  }
  for (const Grouping x : {kMx1x32, kMx32x32}) {
    for (const Grouping w : {kMx1x32, kMx32x32}) {
      EXPECT_EQ(path(90, x, w), GemmPath::kWidened);
      for (const int blackwell : {100, 103, 120}) {
        EXPECT_EQ(path(blackwell, x, w), GemmPath::kMx);
        EXPECT_EQ(path(blackwell, x, w, 60), GemmPath::kWidened) << "N % 8";
        EXPECT_EQ(path(blackwell, x, w, 64, 272), GemmPath::kWidened) << "K % 32";
      }
    }
  }
  for (const int capability : {80, 90, 100}) {  // a slower path always has a reason
    for (const Grouping x : testing::kGroupings) {
      for (const Grouping w : testing::kGroupings) {
        const GemmChoice choice = choose_gemm(capability, x, w, 64, 256);
        EXPECT_EQ(choice.path == GemmPath::kWidened, *choice.reason != '\0');
      }
    }
  }
}

}  // namespace
}  // namespace rowshard
