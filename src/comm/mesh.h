// Ranks arranged as dp_replicate x dp_shard x tp; tp is innermost, so its groups are neighbours.
#pragma once

#include <ostream>
#include <vector>

namespace rowshard {

enum class Axis { kReplicate, kShard, kTp };
const char* to_string(Axis axis);

struct MeshCoordinates {
  int dp_replicate = 0;
  int dp_shard = 0;
  int tp = 0;
  bool operator==(const MeshCoordinates&) const = default;
};

struct Mesh {
  int dp_replicate = 1;
  int dp_shard = 1;
  int tp = 1;

  int size() const { return dp_replicate * dp_shard * tp; }
  /// Ranks that see different data.
  int data_parallel() const { return dp_replicate * dp_shard; }
  MeshCoordinates coordinates(int rank) const;
  int rank_of(const MeshCoordinates& at) const;
  /// The ranks that differ from `rank` along one axis only, itself included, in axis order.
  std::vector<int> group(int rank, Axis axis) const;
  /// The ranks with the same tp coordinate: over them gradients of data-parallel copies are summed.
  std::vector<int> data_group(int rank) const;
  /// 0 … n-1 over data_parallel(): which part of the data this rank reads.
  int data_rank(int rank) const;

  bool operator==(const Mesh&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Mesh& mesh);

/// A mesh that covers the world exactly. dp_shard = 0 takes the ranks that are left. Throws
/// ConfigError with sizes that work when the product is not world_size.
Mesh make_mesh(int world_size, int dp_replicate, int dp_shard, int tp);

}  // namespace rowshard
