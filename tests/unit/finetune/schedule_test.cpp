#include "finetune/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"

namespace rowshard {
namespace {

TEST(Schedule, WarmUpIsLinearFromZero) {
  for (auto shape : {LrSchedule::kConstant, LrSchedule::kLinear, LrSchedule::kCosine}) {
    const Schedule schedule(shape, 0.8, 4, 12);
    EXPECT_DOUBLE_EQ(schedule.lr(1), 0) << to_string(shape);
    EXPECT_DOUBLE_EQ(schedule.lr(2), 0.2) << to_string(shape);
    EXPECT_DOUBLE_EQ(schedule.lr(4), 0.6) << to_string(shape);
    EXPECT_DOUBLE_EQ(schedule.lr(5), 0.8) << to_string(shape);
  }
}

TEST(Schedule, ClosedValues) {
  const Schedule constant(LrSchedule::kConstant, 0.8, 4, 12);
  const Schedule linear(LrSchedule::kLinear, 0.8, 4, 12);
  const Schedule cosine(LrSchedule::kCosine, 0.8, 4, 12);
  EXPECT_DOUBLE_EQ(constant.lr(12), 0.8);
  EXPECT_DOUBLE_EQ(linear.lr(7), 0.6);
  EXPECT_DOUBLE_EQ(linear.lr(9), 0.4);
  EXPECT_DOUBLE_EQ(linear.lr(12), 0.1);
  EXPECT_DOUBLE_EQ(cosine.lr(7), 0.4 * (1 + std::sqrt(0.5)));
  EXPECT_NEAR(cosine.lr(9), 0.4, 1e-15);
  EXPECT_NEAR(cosine.lr(11), 0.4 * (1 - std::sqrt(0.5)), 1e-15);
}

TEST(Schedule, EdgesOfWarmUp) {
  const Schedule none(LrSchedule::kCosine, 0.5, 0, 1);
  EXPECT_DOUBLE_EQ(none.lr(1), 0.5);
  const Schedule only(LrSchedule::kCosine, 0.6, 3, 3);
  EXPECT_DOUBLE_EQ(only.lr(3), 0.4);
}

TEST(Schedule, RefusesWhatIsOutside) {
  EXPECT_THROW(Schedule(LrSchedule::kLinear, 1, 0, 0), ConfigError);
  EXPECT_THROW(Schedule(LrSchedule::kLinear, 1, 5, 4), ConfigError);
  const Schedule schedule(LrSchedule::kLinear, 1, 1, 4);
  EXPECT_THROW(schedule.lr(0), LogicError);
  EXPECT_THROW(schedule.lr(5), LogicError);
}

}  // namespace
}  // namespace rowshard
