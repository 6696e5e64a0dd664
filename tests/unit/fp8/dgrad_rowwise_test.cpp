#include "fp8/dgrad_rowwise.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "fp8/gemm.h"
#include "fp8/rebuild.h"
#include "fp8_test_data.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Fp8Tensor;
using testing::quantized;

// The product on a columnwise copy, to the bit, on either device.
TEST(DgradRowwise, EqualsTheColumnwiseProduct) {
  const Shape shapes[] = {{1, 128, 512},   {7, 576, 192},  {64, 192, 1536},
                          {130, 336, 704}, {129, 144, 16}, {300, 528, 1024}};
  for (const Shape& s : shapes) {
    const int64_t m = s[0], n = s[1], k = s[2];
    for (const bool power_of_two : {true, false}) {
      Bench bench;
      const Fp8Tensor dy = quantized(bench, Grouping::k1x128, m, n, 1, power_of_two);
      const Fp8Tensor w = quantized(bench, Grouping::k128x128, n, k, 2, power_of_two);
      const Fp8Tensor columnwise(bench, Grouping::k128x128, k, n);
      rebuild_columnwise(columnwise.view(), w.view(), bench.stream);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const float beta : {0.0f, 1.0f}) {
          const auto result = [&](auto&& product) {
            std::vector<float> start = testing::many_scales(m, k, 4);
            const Tensor dx = upload_as(bench, start, dtype, {m, k});
            product(dx);
            return bench.download<uint8_t>(dx);
          };
          const auto wanted = result([&](const View& dx) {
            fp8_gemm(dx, dy.view(), columnwise.view(), {.beta = beta, .bias = std::nullopt},
                     bench.ctx);
          });
          const auto got = result(
              [&](const View& dx) { fp8_dgrad_rowwise(dx, dy.view(), w.view(), beta, bench.ctx); });
          EXPECT_EQ(testing::difference(got, wanted), "equal")
              << s << " " << to_string(dtype) << " beta " << beta;
        }
      }
    }
  }
}

// No scratch on Hopper, a columnwise copy in workspace elsewhere; the plan device knows.
TEST(DgradRowwise, PlanCountsTheScratch) {
  const auto peak = [&](Device device) {
    Arena arena(device);
    Stream stream(device);
    Context ctx{arena, stream};
    const auto tensor = [&](DType dtype, Shape shape) {
      return arena.tensor(Category::kActivations, "operand", dtype, shape);
    };
    const auto operand = [&](Grouping grouping, int64_t outer, int64_t inner) {
      return std::pair{tensor(DType::kE4M3, {outer, inner}),
                       tensor(DType::kF32, gemm_scale_shape(grouping, outer, inner))};
    };
    const auto [dy, dy_scales] = operand(Grouping::k1x128, 40, 144);
    const auto [w, w_scales] = operand(Grouping::k128x128, 144, 272);
    const Tensor dx = tensor(DType::kF32, {40, 272});
    fp8_dgrad_rowwise(dx, {dy, dy_scales, Grouping::k1x128}, {w, w_scales, Grouping::k128x128}, 0,
                      ctx);
    stream.synchronize();
    return arena.bytes(Category::kWorkspace).peak;
  };
  const bool cuda = testing::test_device.is_cuda();
  const int64_t planned = peak({DeviceKind::kPlan, cuda ? 1 : 0});
  EXPECT_EQ(planned, peak(testing::test_device));
  EXPECT_EQ(planned == 0, cuda);
  EXPECT_EQ(peak({DeviceKind::kPlan, 1}), 0);
}

TEST(DgradRowwise, RunsWhereItsHeaderSays) {
  const auto runs = [](int capability, DType dx, DType codes, int64_t n, int64_t k) {
    const ConstFp8View dy(ConstView(nullptr, codes, {8, n}, kHost), {}, Grouping::k1x128);
    const ConstFp8View w(ConstView(nullptr, codes, {n, k}, kHost), {}, Grouping::k128x128);
    return dgrad_rowwise_runs(capability, dx, dy, w);
  };
  EXPECT_TRUE(runs(90, DType::kBF16, DType::kE4M3, 144, 272));
  EXPECT_TRUE(runs(90, DType::kF32, DType::kE4M3, 16, 16));
  EXPECT_FALSE(runs(89, DType::kBF16, DType::kE4M3, 144, 272));
  EXPECT_FALSE(runs(100, DType::kBF16, DType::kE4M3, 144, 272));
  EXPECT_FALSE(runs(90, DType::kF16, DType::kE4M3, 144, 272));
  EXPECT_FALSE(runs(90, DType::kBF16, DType::kE5M2, 144, 272));
  EXPECT_FALSE(runs(90, DType::kBF16, DType::kE4M3, 136, 272));
  EXPECT_FALSE(runs(90, DType::kBF16, DType::kE4M3, 144, 280));
}

TEST(DgradRowwise, ErrorsAreNamed) {
  Bench bench;
  const Fp8Tensor dy(bench, Grouping::k1x128, 16, 144), w(bench, Grouping::k128x128, 144, 272);
  const Fp8Tensor w_1d(bench, Grouping::k1x128, 144, 272),
      short_w(bench, Grouping::k128x128, 128, 272);
  const auto result = [&](Shape shape) {
    return bench.arena.tensor(Category::kActivations, "dx", DType::kF32, shape);
  };
  const Tensor dx = result({16, 272}), wrong = result({16, 144});
  EXPECT_NO_THROW(fp8_dgrad_rowwise(dx, dy.view(), w.view(), 0, bench.ctx));
  EXPECT_THROW(fp8_dgrad_rowwise(wrong, dy.view(), w.view(), 0, bench.ctx), ShapeError);
  EXPECT_THROW(fp8_dgrad_rowwise(dx, dy.view(), short_w.view(), 0, bench.ctx), ShapeError);
  EXPECT_THROW(fp8_dgrad_rowwise(dx, dy.view(), w_1d.view(), 0, bench.ctx), ShapeError);
  EXPECT_THROW(fp8_dgrad_rowwise(dx, w.view(), w.view(), 0, bench.ctx), ShapeError);
}

}  // namespace
}  // namespace rowshard
