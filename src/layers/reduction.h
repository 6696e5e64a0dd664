// The order in which a whole tensor is summed, the same on both devices and for every number of
// threads and blocks, so that the result has the same bits everywhere.
//
// The tensor is cut into chunks. In a chunk, lane l adds elements l, l + lanes, l + 2·lanes, … in
// f64; then lane l adds lane l + lanes/2, and so on by halves to lane 0. The chunk sums are summed
// in the same way, as one chunk of any length.
#pragma once

#include <cstdint>

namespace rowshard {

inline constexpr int64_t kReductionLanes = 256;
inline constexpr int64_t kReductionChunk = 64 * kReductionLanes;

}  // namespace rowshard
