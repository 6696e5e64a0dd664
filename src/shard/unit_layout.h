// Where each weight of a unit lies in the unit's one flat rowwise buffer, and how the buffer is
// cut.
//
// A unit is the weights gathered together: one decoder block, the embedding, the head. Its rowwise
// bytes — e4m3 codes, bf16 norms, whatever the storage — lie one after another, each weight on a
// 256-byte border (TMA and cuBLASLt want 16). The buffer is cut into equal parts, one a rank; cuts
// may fall anywhere, also inside a 128x128 block, because frozen bytes are moved and never
// quantised again. Scales are 0.024 % of the codes and are replicated.
#pragma once

#include <string>
#include <vector>

#include "core/view.h"

namespace rowshard {

enum class Storage {
  kFp8Block,  // e4m3 codes, one fp32 scale per 128x128 block
  kPlain,     // elements of `dtype`, no scales
};

struct WeightSpec {
  std::string name;  // module path as in the checkpoint, without ".weight"
  Shape shape;       // [N, K] for a linear weight, [H] for a norm
  Storage storage = Storage::kPlain;
  DType dtype = DType::kBF16;  // kE4M3 for kFp8Block

  int64_t elements() const { return shape.elements(); }
  int64_t bytes() const { return elements() * size_of(dtype); }
  bool operator==(const WeightSpec&) const = default;
};

class UnitLayout {
 public:
  UnitLayout(std::string name, std::vector<WeightSpec> weights, int ranks);

  const std::string& name() const { return name_; }
  const std::vector<WeightSpec>& weights() const { return weights_; }
  int ranks() const { return ranks_; }

  int64_t offset(int weight) const { return offsets_[weight]; }  // bytes from the buffer's start
  int64_t shard_bytes() const { return shard_bytes_; }           // of every rank, padding included
  int64_t gathered_bytes() const { return shard_bytes_ * ranks_; }
  int64_t scale_bytes() const;  // replicated, GEMM layout

  /// A run of bytes of one weight that lies in a rank's part.
  struct Piece {
    int weight;
    int64_t begin, end;    // bytes inside the weight
    int64_t shard_offset;  // where the run starts in the part
  };
  /// What `rank` owns, in order. Padding belongs to no piece.
  std::vector<Piece> pieces(int rank) const;

 private:
  std::string name_;
  std::vector<WeightSpec> weights_;
  std::vector<int64_t> offsets_;
  int ranks_;
  int64_t shard_bytes_ = 0;
};

}  // namespace rowshard
