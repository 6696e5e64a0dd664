#include "shard/usage_plan.h"

#include <gtest/gtest.h>

namespace rowshard {
namespace {

// embedding+head (0), blocks 1 … 4; a training pass that stops at block 2 of 1 … 4.
std::vector<UnitUse> training() {
  return {{0, Pass::kForward},  {1, Pass::kForward}, {2, Pass::kForward},  {3, Pass::kForward},
          {4, Pass::kForward},  {0, Pass::kForward}, {0, Pass::kBackward}, {4, Pass::kBackward},
          {3, Pass::kBackward}, {2, Pass::kBackward}};
}

std::vector<UnitLayout> layouts(int ranks) {
  std::vector<UnitLayout> units;
  for (int i = 0; i < 5; ++i) {
    units.emplace_back(message("u", i),
                       std::vector<WeightSpec>{{"w", {256, 256}, Storage::kPlain, DType::kBF16}},
                       ranks);
  }
  return units;
}

TEST(UsagePlan, TrueGathersEachUnitOncePerDirection) {
  const UsagePlan plan = UsagePlan::make(Phase::kTraining, training(), 5, {ReshardMode::kTrue, 1});
  // Forward 0 1 2 3 4, head 0, backward 3 2; the turn at the head keeps units 0 and 4.
  EXPECT_EQ(plan.gathers(), 8);
  EXPECT_TRUE(plan.steps[0].gather);
  EXPECT_EQ(plan.steps[0].prefetch, std::vector<int>{1});
  EXPECT_FALSE(plan.steps[4].release) << "unit 4 would be gathered again beside the head";
  EXPECT_EQ(plan.steps[5].prefetch, std::vector<int>{}) << "unit 4, which is there";
  EXPECT_FALSE(plan.steps[5].release) << "used again at once";
  EXPECT_TRUE(plan.steps[6].release);
  for (size_t i = 1; i < plan.steps.size(); ++i) {
    EXPECT_FALSE(plan.steps[i].gather) << "every other gather is hidden behind a use, " << i;
  }
  EXPECT_TRUE(plan.steps.back().release);
  const auto units = layouts(2);
  EXPECT_EQ(plan.peak_gathered(units), 2 * units[0].gathered_bytes()) << "(prefetch + 1) units";
}

TEST(UsagePlan, PrefetchBoundsTheTransient) {
  const auto units = layouts(3);
  for (int prefetch : {0, 1, 2, 3}) {
    const UsagePlan plan =
        UsagePlan::make(Phase::kTraining, training(), 5, {ReshardMode::kTrue, prefetch});
    EXPECT_LE(plan.peak_gathered(units), (prefetch + 1) * units[0].gathered_bytes()) << prefetch;
    // Without prefetch only the head's turn is spared; with more, ever more units at the turn.
    EXPECT_EQ(plan.gathers(), prefetch == 0 ? 9 : 9 - std::min(prefetch, 3)) << prefetch;
  }
}

// After a head that is used in forward and backward at once, what comes next is on its way while it
// computes.
TEST(UsagePlan, LooksPastTheUnitInUse) {
  const std::vector<UnitUse> uses{{0, Pass::kForward},
                                  {1, Pass::kForward},
                                  {2, Pass::kForward},
                                  {2, Pass::kBackward},
                                  {0, Pass::kBackward}};
  const UsagePlan plan = UsagePlan::make(Phase::kTraining, uses, 3, {ReshardMode::kTrue, 1});
  EXPECT_EQ(plan.steps[2].prefetch, std::vector<int>{0});
  EXPECT_FALSE(plan.steps[4].gather);
}

TEST(UsagePlan, GroupKeepsSlicesOfWhatBackwardUses) {
  const auto units = layouts(4);
  const int64_t whole = units[0].gathered_bytes();
  const UsagePlan plan =
      UsagePlan::make(Phase::kTraining, training(), 5, {ReshardMode::kGroup, 1, 2});
  EXPECT_EQ(plan.gathers(), 8);
  for (size_t i = 0; i < plan.steps.size(); ++i)
    EXPECT_EQ(plan.steps[i].to_group, i == 0 || i == 2 || i == 3) << i;
  EXPECT_STREQ(after(plan.steps[2]), "reshard to group");
  EXPECT_STREQ(after(plan.steps[9]), "reshard");
  // Slices of units 0, 2 and 3 beside two whole units: 4, and 0 on its way to be the head.
  EXPECT_EQ(plan.peak_gathered(units), 2 * whole + 3 * whole / 2);
  for (const PlanStep& step :
       UsagePlan::make(Phase::kValidation, {{0, Pass::kForward}, {1, Pass::kForward}}, 5,
                       {ReshardMode::kGroup, 1, 2})
           .steps) {
    EXPECT_TRUE(step.release && !step.to_group) << "no backward follows";
  }
  EXPECT_THROW(UsagePlan::make(Phase::kTraining, training(), 5, {ReshardMode::kGroup, 1, 1}),
               LogicError);
}

TEST(UsagePlan, FalseGathersOnceAndKeepsUntilTheLastUse) {
  const UsagePlan plan = UsagePlan::make(Phase::kTraining, training(), 5, {ReshardMode::kFalse, 1});
  EXPECT_EQ(plan.gathers(), 5);
  EXPECT_FALSE(plan.steps[2].release) << "unit 2 has a backward to come";
  EXPECT_TRUE(plan.steps[1].release) << "unit 1 has none: it is below the lowest adapter";
  EXPECT_TRUE(plan.steps[9].release);
  const auto units = layouts(2);
  EXPECT_EQ(plan.peak_gathered(units), 4 * units[0].gathered_bytes());
}

TEST(UsagePlan, ResidentGathersNothingDuringAStep) {
  const UsagePlan plan =
      UsagePlan::make(Phase::kTraining, training(), 5, {ReshardMode::kResident, 1});
  EXPECT_EQ(plan.gathers(), 0);
  for (const PlanStep& step : plan.steps)
    EXPECT_FALSE(step.release);
}

// With another pass to come, the turn to it is like any other: its first units are gathered beside
// the last uses, what is there stays, and the pause between the passes holds (prefetch + 1) units.
TEST(UsagePlan, TheTurnToTheNextPass) {
  // Embedding 0, blocks 1 … 3 and a head 4; backward down to block 1.
  const std::vector<UnitUse> uses{{0, Pass::kForward},  {1, Pass::kForward},  {2, Pass::kForward},
                                  {3, Pass::kForward},  {4, Pass::kForward},  {4, Pass::kBackward},
                                  {3, Pass::kBackward}, {2, Pass::kBackward}, {1, Pass::kBackward}};
  const auto units = layouts(2);
  const int64_t whole = units[0].gathered_bytes();
  for (const int prefetch : {1, 2, 3}) {
    const UsagePlan alone =
        UsagePlan::make(Phase::kTraining, uses, 5, {ReshardMode::kTrue, prefetch});
    const UsagePlan plan =
        UsagePlan::make(Phase::kTraining, uses, 5, {ReshardMode::kTrue, prefetch}, Follows::kStep);
    EXPECT_TRUE(alone.opening.empty() && alone.closing.empty());
    EXPECT_EQ(plan.opening.size(), static_cast<size_t>(prefetch) + 1);
    EXPECT_EQ(plan.opening[0], 0);
    EXPECT_EQ(plan.opening[1], 1);
    EXPECT_FALSE(plan.steps[8].release) << "block 1 is the second unit of the next pass";
    EXPECT_TRUE(alone.steps[8].release);
    EXPECT_EQ(plan.steps[7].release, prefetch < 2);
    // The embedding is asked for as soon as the depth allows it.
    EXPECT_EQ(plan.steps[9 - prefetch].prefetch, std::vector<int>{0});
    EXPECT_TRUE(plan.closing.empty()) << "all of them are there by then";
    EXPECT_EQ(plan.peak_gathered(units), (prefetch + 1) * whole);
    EXPECT_NE(plan.table(units).find("left for the next pass: u0, u1"), std::string::npos);
    EXPECT_EQ(alone.table(units).find("left for"), std::string::npos);
  }
  EXPECT_TRUE(
      UsagePlan::make(Phase::kTraining, uses, 5, {ReshardMode::kTrue, 0}, Follows::kStep).opening ==
      std::vector<int>{})
      << "without prefetch nothing is gathered ahead";
  EXPECT_TRUE(
      UsagePlan::make(Phase::kTraining, uses, 5, {ReshardMode::kResident, 2}, Follows::kMicroBatch)
          .opening.empty());
  // A forward pass, as validation repeats it: what it begins with comes beside its last uses.
  const UsagePlan forward = UsagePlan::make(Phase::kValidation, {uses.begin(), uses.begin() + 5}, 5,
                                            {ReshardMode::kTrue, 1}, Follows::kMicroBatch);
  EXPECT_EQ(forward.steps[4].prefetch, std::vector<int>{0});
  EXPECT_EQ(forward.closing, std::vector<int>{1});
}

TEST(UsagePlan, OneRankHasNoTransient) {
  const UsagePlan plan = UsagePlan::make(Phase::kTraining, training(), 5, {ReshardMode::kTrue, 2});
  EXPECT_EQ(plan.peak_gathered(layouts(1)), 0);
}

TEST(UnitLayout, PiecesCoverEveryByteOnceAtAnyRankCount) {
  // 576 x 192 and 3 x 5: sizes that no power of two divides.
  for (int ranks : {1, 2, 3, 4, 7}) {
    const UnitLayout layout("u",
                            {{"a", {576, 192}, Storage::kFp8Block, DType::kE4M3},
                             {"b", {3, 5}, Storage::kPlain, DType::kF32},
                             {"c", {576}, Storage::kPlain, DType::kBF16}},
                            ranks);
    std::vector<std::vector<int>> seen(3);
    for (int i = 0; i < 3; ++i)
      seen[i].assign(layout.weights()[i].bytes(), 0);
    for (int rank = 0; rank < ranks; ++rank) {
      for (const UnitLayout::Piece& piece : layout.pieces(rank)) {
        EXPECT_GE(piece.shard_offset, 0);
        EXPECT_LE(piece.shard_offset + piece.end - piece.begin, layout.shard_bytes());
        // The part's place in the gathered buffer is the weight's own offset.
        EXPECT_EQ(rank * layout.shard_bytes() + piece.shard_offset,
                  layout.offset(piece.weight) + piece.begin);
        for (int64_t i = piece.begin; i < piece.end; ++i)
          ++seen[piece.weight][i];
      }
    }
    for (const auto& weight : seen) {
      for (int count : weight)
        ASSERT_EQ(count, 1) << ranks;
    }
    EXPECT_EQ(layout.gathered_bytes() % (256 * ranks), 0);
  }
}

TEST(UnitLayout, MoreRanksThanBytesLeavesEmptyShards) {
  const UnitLayout layout("u", {{"n", {8}, Storage::kPlain, DType::kF32}}, 4);
  EXPECT_EQ(layout.pieces(0).size(), 1u);
  for (int rank : {1, 2, 3})
    EXPECT_TRUE(layout.pieces(rank).empty());
}

}  // namespace
}  // namespace rowshard
