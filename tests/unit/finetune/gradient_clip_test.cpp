#include "finetune/gradient_clip.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/rng.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;

TEST(GradientClip, SumOfSquaresOfAnyLength) {
  for (int64_t n : {0, 1, 31, 4096, 100003}) {
    Bench bench;
    const Philox rng{3, static_cast<uint64_t>(n)};
    std::vector<float> x(n);
    double expected = 0;
    for (int64_t i = 0; i < n; ++i) {
      x[i] = static_cast<float>(std::exp2(static_cast<double>(i / 1000 % 7) - 3) * rng.normal(i));
      expected += double{x[i]} * x[i];
    }
    Tensor vector = bench.upload(x, {n});
    Tensor squares = bench.arena.tensor(Category::kWorkspace, "squares", DType::kF32, {1});
    sum_of_squares(squares, vector, false, bench.ctx);
    const float once = bench.download<float>(squares)[0];
    // f64 sums, one rounding to f32.
    EXPECT_NEAR(once, expected, 1e-7 * expected) << n;
    sum_of_squares(squares, vector, false, bench.ctx);
    EXPECT_EQ(bench.download<float>(squares)[0], once) << n << ": not reproducible";
    sum_of_squares(squares, vector, true, bench.ctx);
    EXPECT_NEAR(bench.download<float>(squares)[0], 2 * expected, 3e-7 * expected) << n;
  }
}

// {factor, norm}
std::vector<float> scale_of(float squares, float tokens, double clip_norm) {
  Bench bench;
  Tensor s = bench.upload(std::vector<float>{squares}, {1});
  Tensor t = bench.upload(std::vector<float>{tokens}, {1});
  Tensor result = bench.arena.tensor(Category::kWorkspace, "result", DType::kF32, {2});
  gradient_scale(result, s, t, clip_norm, bench.ctx);
  return bench.download<float>(result);
}

TEST(GradientClip, FactorClipsAndNormalises) {
  // Norm of the sum 60, of the mean 3.
  const auto clipped = scale_of(3600, 20, 1.5);
  EXPECT_FLOAT_EQ(clipped[1], 3);
  EXPECT_FLOAT_EQ(clipped[0], 0.5f / 20);
  EXPECT_FLOAT_EQ(scale_of(3600, 20, 3.5)[0], 1.0f / 20) << "below the limit nothing is scaled";
  EXPECT_FLOAT_EQ(scale_of(3600, 20, 0)[0], 1.0f / 20) << "0 never clips";
  EXPECT_FLOAT_EQ(scale_of(3600, 20, 0)[1], 3) << "the norm is reported all the same";
}

TEST(GradientClip, NoTokenGivesNoGradient) {
  EXPECT_EQ(scale_of(0, 0, 1), (std::vector<float>{0, 0}));
}

TEST(GradientClip, ANormThatIsNotFiniteGivesNaN) {
  for (float squares :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (double clip : {0.0, 1.0}) {
      const auto result = scale_of(squares, 8, clip);
      EXPECT_TRUE(std::isnan(result[0])) << result[0];
      EXPECT_FALSE(std::isfinite(result[1])) << result[1];
    }
  }
}

TEST(GradientClip, RefusesOperandsThatDoNotFit) {
  Bench bench;
  Tensor one = bench.upload(std::vector<float>{1}, {1});
  Tensor two = bench.upload(std::vector<float>{1, 2}, {2});
  EXPECT_THROW(sum_of_squares(two, one, false, bench.ctx), ShapeError);
  EXPECT_THROW(gradient_scale(one, one, one, 1, bench.ctx), ShapeError);
  EXPECT_THROW(gradient_scale(two, one, two, 1, bench.ctx), ShapeError);
  EXPECT_THROW(gradient_scale(two, one, one, -1, bench.ctx), LogicError);
}

}  // namespace
}  // namespace rowshard
