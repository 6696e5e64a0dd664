// The plan of a call from its facts, case by case. No device takes part.
#include "layers/linear_plan.h"

#include <gtest/gtest.h>

namespace rowshard {
namespace {

constexpr Usage kNone{}, kRowwise{true, false}, kColumnwise{false, true}, kBoth{true, true};

TEST(LinearPlan, AFrozenFp8LayerMakesAndKeepsTheLeast) {
  const LinearPlan plan = plan_linear({.fp8 = true});
  EXPECT_EQ(plan.x8, kRowwise);
  EXPECT_EQ(plan.saves_x8, kNone);
  EXPECT_FALSE(plan.saves_x);
  EXPECT_FALSE(plan.reads_x);
  EXPECT_EQ(plan.dy8, kRowwise);
  EXPECT_EQ(plan.dgrad, DgradSource::kRebuild);
  EXPECT_TRUE(plan.release);
}

TEST(LinearPlan, ATrainableOneMakesBothCopiesTogetherAndKeepsTheColumnwiseX) {
  const LinearPlan plan = plan_linear({.fp8 = true, .wgrad = true});
  EXPECT_EQ(plan.x8, kBoth);
  EXPECT_EQ(plan.saves_x8, kColumnwise);
  EXPECT_FALSE(plan.saves_x);
  EXPECT_EQ(plan.dy8, kBoth);
  EXPECT_FALSE(plan.release);
}

TEST(LinearPlan, AnAdapterReadsXAsItIsAndChangesNothingElse) {
  const LinearPlan with = plan_linear({.fp8 = true, .adapter = true});
  LinearPlan without = plan_linear({.fp8 = true});
  without.reads_x = without.saves_x = true;
  EXPECT_EQ(with, without);
  // In the cheapest form: where x can be made again, nothing of it is kept.
  const LinearPlan again = plan_linear({.fp8 = true, .adapter = true, .input_again = true});
  EXPECT_FALSE(again.saves_x);
  EXPECT_TRUE(again.x_again);
  EXPECT_EQ(again.x8_again, kNone);
}

TEST(LinearPlan, WithoutABackwardNothingIsKeptOrMadeForOne) {
  for (const bool wgrad : {false, true}) {
    for (const bool adapter : {false, true}) {
      const LinearPlan plan =
          plan_linear({.fp8 = true, .backward = false, .wgrad = wgrad, .adapter = adapter});
      EXPECT_EQ(plan.x8, kRowwise);
      EXPECT_FALSE(plan.saves_x);
      EXPECT_EQ(plan.saves_x8, kNone);
      EXPECT_EQ(plan.dgrad, DgradSource::kNone);
      EXPECT_FALSE(plan.release);
    }
  }
}

TEST(LinearPlan, WithoutDxNoDgradRunsAndNoCopyOfTheWeightIsTouched) {
  const LinearPlan frozen = plan_linear({.fp8 = true, .dgrad = false, .adapter = true});
  EXPECT_EQ(frozen.dy8, kNone);
  EXPECT_EQ(frozen.dgrad, DgradSource::kNone);
  EXPECT_FALSE(frozen.release);
  EXPECT_EQ(plan_linear({.fp8 = true, .dgrad = false, .wgrad = true}).dy8, kColumnwise);
}

TEST(LinearPlan, ACopyThatIsThereIsReadAndGoesByThePolicy) {
  const LinearFacts there{.fp8 = true, .has_columnwise = true};
  EXPECT_EQ(plan_linear(there).dgrad, DgradSource::kColumnwise);
  EXPECT_TRUE(plan_linear(there).release);
  LinearFacts facts = there;
  facts.policy = ColumnwisePolicy::kResident;
  EXPECT_FALSE(plan_linear(facts).release);
  facts = there;
  facts.rebuildable = false;  // 1x128, MX 1x32, or no rowwise copy
  EXPECT_FALSE(plan_linear(facts).release);
  facts = there;
  facts.pinned = true;
  EXPECT_FALSE(plan_linear(facts).release);
  facts = there;
  facts.wgrad = true;
  EXPECT_FALSE(plan_linear(facts).release);
  facts = there;
  facts.policy = ColumnwisePolicy::kDirect;
  EXPECT_EQ(plan_linear(facts).dgrad, DgradSource::kDirect);
  EXPECT_TRUE(plan_linear(facts).release);
  facts.direct = false;  // no 128x128 blocks
  EXPECT_EQ(plan_linear(facts).dgrad, DgradSource::kColumnwise);
  facts.direct = true;
  facts.policy = ColumnwisePolicy::kAuto;
  EXPECT_EQ(plan_linear(facts).dgrad, DgradSource::kColumnwise) << "it is there";
  facts.has_columnwise = false;
  EXPECT_EQ(plan_linear(facts).dgrad, DgradSource::kAuto);
  EXPECT_TRUE(plan_linear(facts).release);
  facts.direct = false;
  EXPECT_EQ(plan_linear(facts).dgrad, DgradSource::kRebuild);
  facts = there;
  facts.policy = ColumnwisePolicy::kDirect;
  facts.wgrad = true;
  EXPECT_EQ(plan_linear(facts).dgrad, DgradSource::kColumnwise) << "only frozen weights go direct";
}

// A recording either rebuilds into scratch that it gives back, or reads a copy that stays: never a
// copy that is made in it and is believed to be there afterwards, never one that it frees.
TEST(LinearPlan, ARecordingFreesNothingThatWasThere) {
  const LinearPlan absent = plan_linear({.fp8 = true, .capturing = true});
  EXPECT_EQ(absent.dgrad, DgradSource::kRebuild);
  EXPECT_TRUE(absent.release);
  EXPECT_FALSE(absent.pin);
  const LinearPlan there = plan_linear({.fp8 = true, .has_columnwise = true, .capturing = true});
  EXPECT_EQ(there.dgrad, DgradSource::kColumnwise);
  EXPECT_FALSE(there.release);
  EXPECT_TRUE(there.pin);
}

TEST(LinearPlan, OverridesReadTheWeightAndXInOtherForms) {
  for (const auto how : {BackwardOverride::kHighPrecision, BackwardOverride::kDequantized}) {
    const LinearPlan frozen =
        plan_linear({.fp8 = true, .has_columnwise = true, .backward_override = how});
    EXPECT_EQ(frozen.dgrad, DgradSource::kPlain);
    EXPECT_EQ(frozen.dy8, kNone);
    EXPECT_TRUE(frozen.release) << "a copy of before goes";
    const LinearPlan trained = plan_linear({.fp8 = true, .wgrad = true, .backward_override = how});
    const bool dequantized = how == BackwardOverride::kDequantized;
    EXPECT_EQ(trained.x8, kRowwise);
    EXPECT_EQ(trained.saves_x8, dequantized ? kRowwise : kNone);
    EXPECT_EQ(trained.saves_x, !dequantized);
  }
}

TEST(LinearPlan, APlainLayerKeepsXOnlyForItsOwnGradientOrAnAdapter) {
  EXPECT_FALSE(plan_linear({}).saves_x);
  EXPECT_TRUE(plan_linear({.wgrad = true}).saves_x);
  EXPECT_TRUE(plan_linear({.adapter = true}).saves_x);
  EXPECT_EQ(plan_linear({.wgrad = true}).x8, kNone);
  EXPECT_EQ(plan_linear({}).dgrad, DgradSource::kPlain);
}

TEST(LinearPlan, ReadsAsOneLine) {
  EXPECT_EQ(
      to_string(plan_linear({.fp8 = true, .adapter = true})),
      "forward: x8 {rowwise}, reads x, saves x and {}; backward: {}, dy8 {rowwise}, dgrad from "
      "rebuild, then release");
}

}  // namespace
}  // namespace rowshard
