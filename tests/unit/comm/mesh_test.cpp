#include "comm/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "core/error.h"

namespace rowshard {
namespace {

TEST(Mesh, TpIsInnermost) {
  const Mesh mesh = make_mesh(12, 2, 3, 2);
  EXPECT_EQ(mesh.coordinates(0), (MeshCoordinates{0, 0, 0}));
  EXPECT_EQ(mesh.coordinates(1), (MeshCoordinates{0, 0, 1}));
  EXPECT_EQ(mesh.coordinates(2), (MeshCoordinates{0, 1, 0}));
  EXPECT_EQ(mesh.coordinates(6), (MeshCoordinates{1, 0, 0}));
  EXPECT_EQ(mesh.coordinates(11), (MeshCoordinates{1, 2, 1}));
  EXPECT_EQ(mesh.group(7, Axis::kTp), (std::vector<int>{6, 7}));
  EXPECT_EQ(mesh.group(7, Axis::kShard), (std::vector<int>{7, 9, 11}));
  EXPECT_EQ(mesh.group(7, Axis::kReplicate), (std::vector<int>{1, 7}));
  EXPECT_EQ(mesh.data_group(7), (std::vector<int>{1, 3, 5, 7, 9, 11}));
  EXPECT_EQ(mesh.data_rank(7), 3);
  EXPECT_EQ(mesh.data_parallel(), 6);
}

TEST(Mesh, GroupsOfEveryAxisPartitionTheWorld) {
  const Mesh mesh = make_mesh(24, 2, 3, 4);
  for (const Axis axis : {Axis::kReplicate, Axis::kShard, Axis::kTp}) {
    std::multiset<int> seen;
    std::set<std::vector<int>> groups;
    for (int rank = 0; rank < mesh.size(); ++rank) {
      EXPECT_EQ(mesh.rank_of(mesh.coordinates(rank)), rank);
      const auto group = mesh.group(rank, axis);
      EXPECT_EQ(std::count(group.begin(), group.end(), rank), 1);
      if (groups.insert(group).second)
        seen.insert(group.begin(), group.end());
    }
    EXPECT_EQ(seen.size(), 24u) << to_string(axis);
    EXPECT_EQ(std::set<int>(seen.begin(), seen.end()).size(), 24u) << to_string(axis);
  }
}

TEST(Mesh, ShardTakesTheRanksThatAreLeft) {
  EXPECT_EQ(make_mesh(8, 1, 0, 2), (Mesh{1, 4, 2}));
  EXPECT_EQ(make_mesh(1, 1, 0, 1), (Mesh{1, 1, 1}));
}

TEST(Mesh, SizesThatDoNotCoverTheWorldAreRefusedWithAdvice) {
  const auto text = [](int world, int replicate, int shard, int tp) -> std::string {
    try {
      make_mesh(world, replicate, shard, tp);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(text(8, 1, 2, 2).find("use dp_shard 4, or start 4 ranks"), std::string::npos);
  EXPECT_NE(text(2, 1, 2, 2).find("needs 4 ranks, but the job has 2"), std::string::npos);
  EXPECT_NE(text(6, 1, 0, 4).find("start a multiple of 4 ranks"), std::string::npos);
  EXPECT_NE(text(4, 0, 1, 4).find("at least 1"), std::string::npos);
  EXPECT_NE(text(4, 1, 1, -4).find("at least 1"), std::string::npos);
  EXPECT_THROW(make_mesh(4, 1, 2, 2).coordinates(4), LogicError);
}

}  // namespace
}  // namespace rowshard
