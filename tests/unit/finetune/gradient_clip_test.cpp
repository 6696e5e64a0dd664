#include "finetune/gradient_clip.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;

// {factor, norm}
std::vector<float> scale_of(double squares, double clip_norm) {
  Bench bench;
  Tensor s = bench.upload(std::vector<double>{squares}, {1});
  Tensor result = bench.arena.tensor(Category::kWorkspace, "result", DType::kF32, {2});
  gradient_scale(result, s, clip_norm, bench.stream);
  return bench.download<float>(result);
}

TEST(GradientClip, FactorClips) {
  const auto clipped = scale_of(9, 1.5);
  EXPECT_FLOAT_EQ(clipped[1], 3);
  EXPECT_FLOAT_EQ(clipped[0], 1.5f / (3 + 1e-6f));
  EXPECT_FLOAT_EQ(scale_of(9, 3.5)[0], 1) << "below the limit nothing is scaled";
  EXPECT_FLOAT_EQ(scale_of(9, 0)[0], 1) << "0 never clips";
  EXPECT_FLOAT_EQ(scale_of(9, 0)[1], 3) << "the norm is reported all the same";
  EXPECT_EQ(scale_of(0, 1), (std::vector<float>{1, 0}));
}

TEST(GradientClip, ANormThatIsNotFiniteGivesNaN) {
  for (double squares :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    for (double clip : {0.0, 1.0}) {
      const auto result = scale_of(squares, clip);
      EXPECT_TRUE(std::isnan(result[0])) << result[0];
      EXPECT_FALSE(std::isfinite(result[1])) << result[1];
    }
  }
}

TEST(GradientClip, RefusesOperandsThatDoNotFit) {
  Bench bench;
  Tensor one = bench.upload(std::vector<double>{1}, {1});
  Tensor two = bench.upload(std::vector<float>{1, 2}, {2});
  EXPECT_THROW(gradient_scale(one, one, 1, bench.stream), ShapeError);
  EXPECT_THROW(gradient_scale(two, two, 1, bench.stream), ShapeError);
  EXPECT_THROW(gradient_scale(two, one, -1, bench.stream), LogicError);
}

}  // namespace
}  // namespace rowshard
