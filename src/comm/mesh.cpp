#include "comm/mesh.h"

#include <string>

#include "core/error.h"

namespace rowshard {

const char* to_string(Axis axis) {
  switch (axis) {
    case Axis::kReplicate:
      return "dp_replicate";
    case Axis::kShard:
      return "dp_shard";
    case Axis::kTp:
      return "tp";
  }
  return "?";
}

std::ostream& operator<<(std::ostream& out, const Mesh& mesh) {
  return out << "dp_replicate " << mesh.dp_replicate << " x dp_shard " << mesh.dp_shard << " x tp "
             << mesh.tp;
}

MeshCoordinates Mesh::coordinates(int rank) const {
  ROWSHARD_CHECK(rank >= 0 && rank < size(), LogicError, "rank ", rank, " is not in mesh ", *this);
  return {rank / (tp * dp_shard), rank / tp % dp_shard, rank % tp};
}

int Mesh::rank_of(const MeshCoordinates& at) const {
  return (at.dp_replicate * dp_shard + at.dp_shard) * tp + at.tp;
}

std::vector<int> Mesh::group(int rank, Axis axis) const {
  MeshCoordinates at = coordinates(rank);
  int& moving = axis == Axis::kReplicate ? at.dp_replicate
                : axis == Axis::kShard   ? at.dp_shard
                                         : at.tp;
  const int count = axis == Axis::kReplicate ? dp_replicate : axis == Axis::kShard ? dp_shard : tp;
  std::vector<int> ranks;
  for (moving = 0; moving < count; ++moving)
    ranks.push_back(rank_of(at));
  return ranks;
}

std::vector<int> Mesh::data_group(int rank) const {
  std::vector<int> ranks;
  for (int other = coordinates(rank).tp; other < size(); other += tp)
    ranks.push_back(other);
  return ranks;
}

int Mesh::data_rank(int rank) const {
  const MeshCoordinates at = coordinates(rank);
  return at.dp_replicate * dp_shard + at.dp_shard;
}

Mesh make_mesh(int world_size, int dp_replicate, int dp_shard, int tp) {
  ROWSHARD_CHECK(dp_replicate >= 1 && tp >= 1 && dp_shard >= 0, ConfigError, "dp_replicate ",
                 dp_replicate, ", dp_shard ", dp_shard, ", tp ", tp,
                 ": sizes are at least 1 (dp_shard 0 takes the ranks that are left)");
  const int fixed = dp_replicate * tp;
  if (dp_shard == 0) {
    ROWSHARD_CHECK(world_size % fixed == 0, ConfigError, world_size,
                   " rank(s) cannot be divided by dp_replicate ", dp_replicate, " x tp ", tp, " = ",
                   fixed, "; start a multiple of ", fixed, " ranks, or choose sizes that divide ",
                   world_size);
    dp_shard = world_size / fixed;
  }
  const Mesh mesh{dp_replicate, dp_shard, tp};
  if (mesh.size() != world_size) {
    const std::string fitting =
        world_size % fixed == 0
            ? message("use dp_shard ", world_size / fixed, ", or start ", mesh.size(), " ranks")
            : message("start ", mesh.size(), " ranks, or choose sizes whose product is ",
                      world_size);
    throw ConfigError(message("mesh ", mesh, " needs ", mesh.size(), " ranks, but the job has ",
                              world_size, "; ", fitting));
  }
  return mesh;
}

}  // namespace rowshard
