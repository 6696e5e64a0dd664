// Which part of a decoder one tensor-parallel rank holds.
//
//   q, k, v        whole heads: rows of W            o      the same heads: columns of W
//   gate, up       part of the FFN: rows of W        down   the same part: columns of W
//   embedding and head   part of the vocabulary: rows
//   norms          whole, on every rank
//
// Query heads are cut evenly. KV heads too, or, when there are fewer of them than ranks, each is
// held by tp / kv_heads neighbouring ranks. The FFN is cut as evenly as its blocks allow: 76 blocks
// over 8 ranks are 10, 10, 10, 10, 9, 9, 9, 9. Every cut of an FP8 weight lies on a border of its
// 128x128 blocks, so that a rank's codes and scales are a part of the whole's.
#pragma once

#include <string>
#include <vector>

#include "model/hf_config.h"
#include "shard/unit_layout.h"

namespace rowshard {

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// `count` things in `parts` runs of neighbours, in steps of `step`; the first runs take what does
/// not divide, the last run is shorter by what `step` does not divide.
Range near_equal_part(int64_t count, int64_t step, int parts, int part);

struct DecoderSlice {
  int ranks = 1, rank = 0;
  Range heads, kv_heads, ffn, vocabulary;
  int kv_replicas = 1;  // neighbouring ranks that hold the same KV heads
  Storage linear = Storage::kPlain;
  bool operator==(const DecoderSlice&) const = default;

  static DecoderSlice whole(const ModelConfig& config);
  /// ConfigError with the sizes that work when the model cannot be cut so.
  static DecoderSlice make(const ModelConfig& config, Storage linear, int ranks, int rank);
  /// What another rank of the same group holds.
  DecoderSlice of(const ModelConfig& config, int other) const {
    return make(config, linear, ranks, other);
  }
};

/// A linear layer of a block as a rank holds it.
struct SlicedLinear {
  LinearModule whole;
  Range rows, cols;  // of W [N, K]

  int64_t n() const { return rows.size(); }
  int64_t k() const { return cols.size(); }
  bool split_rows() const { return n() != whole.n; }
  bool split_cols() const { return k() != whole.k; }
};
/// In the order of ModelConfig::linears().
std::vector<SlicedLinear> sliced_linears(const ModelConfig& config, const DecoderSlice& slice);

}  // namespace rowshard
