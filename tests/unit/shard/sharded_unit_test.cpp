// A unit on one rank: bound in place, its states, and what must be refused.
#include "shard/sharded_unit.h"

#include <gtest/gtest.h>

#include "comm/plan_communicator.h"
#include "comm/world.h"
#include "shard_source.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::gathered_bytes;
using testing::KnownSource;
using testing::mixed_layout;

class ShardedUnitTest : public ::testing::Test {
 protected:
  void gather(ShardedUnit& unit) {
    unit.gather(communication);
    unit.finish_gather(bench.stream);
  }
  std::vector<uint8_t> bytes(ShardedUnit& unit) { return testing::unit_bytes(unit, bench); }

  Bench bench;
  Stream communication{testing::test_device, "gather"};
  std::unique_ptr<World> world = World::create(LaunchEnvironment{}, testing::test_device.kind);
  std::unique_ptr<Communicator> group = world->communicator("gather");
};

TEST_F(ShardedUnitTest, BindsInPlaceWithoutACopy) {
  ShardedUnit unit(mixed_layout(1), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  const int64_t shard = unit.layout().shard_bytes();
  EXPECT_EQ(bench.arena.bytes(Category::kRowwiseShard).now, shard);
  EXPECT_EQ(bench.arena.bytes(Category::kScales).now, unit.layout().scale_bytes());
  const int64_t total = bench.arena.total().now;
  for (int pass = 0; pass < 2; ++pass) {
    gather(unit);
    EXPECT_TRUE(unit.gathered());
    EXPECT_EQ(bytes(unit), gathered_bytes(unit.layout()));
    unit.reshard();
    EXPECT_FALSE(unit.gathered());
  }
  EXPECT_EQ(bench.arena.bytes(Category::kGathered).peak, 0);
  EXPECT_EQ(bench.arena.total().now, total);
  EXPECT_EQ(group->wire_bytes(), 0);
}

TEST_F(ShardedUnitTest, ReadingAShardedWeightIsAUsageError) {
  ShardedUnit unit(mixed_layout(1), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  const auto refused = [&] {
    for (const int weight : {0, 1}) {
      try {
        weight == 0 ? static_cast<void>(unit.plain(0)) : static_cast<void>(unit.fp8(1));
        FAIL() << "weight " << weight << " was read";
      } catch (const UsageError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find(unit.layout().weights()[weight].name), std::string::npos) << text;
        EXPECT_NE(text.find("unit mixed"), std::string::npos) << text;
        EXPECT_NE(text.find("acquire the unit"), std::string::npos) << text;
      }
    }
  };
  refused();  // loaded, never gathered
  unit.gather(communication);
  EXPECT_TRUE(unit.gathering());
  refused();  // on its way
  unit.finish_gather(bench.stream);
  EXPECT_NO_THROW(unit.plain(0));
  unit.reshard();
  refused();
}

TEST_F(ShardedUnitTest, StatesThatDoNotFollow) {
  ShardedUnit unit(mixed_layout(1), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  EXPECT_THROW(unit.finish_gather(bench.stream), LogicError);
  EXPECT_NO_THROW(unit.reshard()) << "of a sharded unit: nothing to do";
  unit.gather(communication);
  EXPECT_THROW(unit.gather(communication), LogicError);
  unit.finish_gather(bench.stream);
  EXPECT_THROW(unit.gather(communication), LogicError);
  EXPECT_THROW(unit.plain(1), LogicError) << "an FP8 weight";
  EXPECT_THROW(unit.fp8(0), LogicError) << "a plain weight";
  unit.reshard();
  unit.gather(communication);
  unit.reshard();  // a gather nobody used
  EXPECT_FALSE(unit.gathering());
  EXPECT_THROW(unit.finish_gather(bench.stream), LogicError);
}

TEST_F(ShardedUnitTest, LayoutAndCommunicatorMustBeOfOneSize) {
  EXPECT_THROW(ShardedUnit(mixed_layout(2), *group, bench.arena), LogicError);
}

// A columnwise copy survives a reshard, because the bytes that come back are the same, but not a
// load of other bytes.
TEST_F(ShardedUnitTest, ColumnwiseCopyIsTrueUntilOtherBytesAreLoaded) {
  ShardedUnit unit(mixed_layout(1), *group, bench.arena);
  constexpr int kQ = 1;
  const auto transposed = [&](int version) {
    const WeightSpec& weight = unit.layout().weights()[kQ];
    const int64_t n = weight.shape[0], k = weight.shape[1];
    std::vector<uint8_t> codes(n * k);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col)
        codes[col * n + row] = testing::weight_byte(weight.name, row * k + col, version);
    }
    return codes;
  };
  for (const int version : {0, 1}) {
    KnownSource source(version);
    unit.load(source, bench.stream);
    EXPECT_FALSE(unit.gathered()) << "loading leaves the unit sharded";
    gather(unit);
    EXPECT_EQ(bytes(unit), gathered_bytes(unit.layout(), version));
    EXPECT_FALSE(unit.fp8(kQ).usage().columnwise) << "what is there is of version " << version - 1;
    unit.fp8(kQ).update_usage(std::nullopt, true, bench.ctx);
    const void* address = unit.fp8(kQ).columnwise().codes.data;
    unit.reshard();
    gather(unit);
    EXPECT_TRUE(unit.fp8(kQ).usage().columnwise);
    EXPECT_EQ(unit.fp8(kQ).columnwise().codes.data, address) << "not made again";
    EXPECT_EQ(bench.download<uint8_t>(unit.fp8(kQ).columnwise().codes), transposed(version));
    // Left gathered: the next load must not leave old bytes bound.
  }
}

// Ranks that own nothing of a unit, and every byte of the accounting, without the ranks.
TEST_F(ShardedUnitTest, BytesPerCategoryAtAnyRankCount) {
  const Device plan{DeviceKind::kPlan, 0};
  for (const int ranks : {1, 2, 3, 5, 64}) {
    Arena arena(plan);
    Stream stream(plan), gathers(plan, "gather");
    PlanCommunicator planned("gather", ranks, ranks - 1, plan);
    ShardedUnit unit(mixed_layout(ranks), planned, arena);
    const UnitLayout& layout = unit.layout();
    KnownSource source;
    unit.load(source, stream);
    int64_t owned = 0;
    for (const UnitLayout::Piece& piece : layout.pieces(ranks - 1))
      owned += piece.end - piece.begin;
    EXPECT_EQ(source.bytes_read, owned) << "a rank reads its own bytes only";
    planned.reset_wire_bytes();
    unit.gather(gathers);
    unit.finish_gather(stream);
    EXPECT_EQ(arena.bytes(Category::kRowwiseShard).now, layout.shard_bytes());
    EXPECT_EQ(arena.bytes(Category::kScales).now, layout.scale_bytes());
    EXPECT_EQ(arena.bytes(Category::kGathered).now, ranks == 1 ? 0 : layout.gathered_bytes());
    EXPECT_EQ(planned.wire_bytes(), layout.gathered_bytes() - layout.shard_bytes());
    unit.reshard();
    EXPECT_EQ(arena.total().now, layout.shard_bytes() + layout.scale_bytes());
  }
  EXPECT_TRUE(mixed_layout(2000).pieces(1999).empty());
}

}  // namespace
}  // namespace rowshard
