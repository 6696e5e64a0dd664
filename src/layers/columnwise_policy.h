// When the columnwise copy of a frozen FP8 weight exists.
#pragma once

namespace rowshard {

enum class ColumnwisePolicy {
  kRelease,   // made just before dgrad, released right after it
  kResident,  // made once, kept
  kDirect,    // never made: a dgrad that reads the rowwise bytes
  kAuto,      // direct for backwards of at most kDirectTokens tokens, else release
};
const char* to_string(ColumnwisePolicy policy);  // "release", "resident", "direct", "auto"

/// Up to as many tokens the direct product was measured as fast as a rebuild and the best product
/// on it, or faster (bench/results/own-gemm-h200-2026-12-01.log).
inline constexpr int kDirectTokens = 1024;

/// What holds now for a frozen weight: ROWSHARD_RELEASE_FROZEN_WEIGHT_COLUMNWISE (1: release, 0:
/// resident), or NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE, its alias, over `asked`. Read at every
/// call, so a job may change it between steps; an override is logged once. ConfigError on another
/// value.
ColumnwisePolicy columnwise_policy(ColumnwisePolicy asked);

}  // namespace rowshard
