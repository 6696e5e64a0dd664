// `rowshard bench collectives`: are the collectives right, and how fast are they.
#pragma once

#include <string>
#include <vector>

#include "comm/world.h"

namespace rowshard {

struct CollectiveResult {
  std::string name;
  int64_t bytes = 0;        // the larger of the operands
  double milliseconds = 0;  // median over repeats of the slowest rank
  double bus_gbps = 0;      // GB/s a rank's link carries, as nccl-tests counts it
};

struct CollectiveBenchOptions {
  int64_t mebibytes = 64;  // of the larger operand
  int repeats = 31;
};

/// Runs every collective over all ranks, compares every byte of the first result with what it must
/// be, then times repeats. Throws Error naming collective, rank and element for a wrong result,
/// Skip below two ranks. Collective; the same result on every rank.
std::vector<CollectiveResult> bench_collectives(World& world,
                                                const CollectiveBenchOptions& options);

}  // namespace rowshard
