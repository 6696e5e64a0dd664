// Where each weight of a unit lies in the unit's one flat rowwise buffer, and how the buffer is
// cut.
//
// A unit is the weights gathered together: one decoder block, the embedding, the head. Its rowwise
// bytes — e4m3 codes, bf16 norms, whatever the storage — lie one after another, each weight on a
// 256-byte border (TMA and cuBLASLt want 16). The buffer is cut into equal parts, one a rank; cuts
// may fall anywhere, also inside a 128x128 block, because frozen bytes are moved and never
// quantised again. Scales are 0.024 % of the codes and are replicated. Under tensor parallelism the
// unit holds this tp rank's slice of each weight, and the ranks of dp_shard share that.
//
// The two copies of an MX matrix cannot be made of each other, so they lie in units of their own:
// forward gathers one, backward the other. MX scales, 3 % of the codes, lie behind the codes as
// part of the weight's bytes and are cut with them.
//
// Weights that are trained lie apart, because their bytes change and their elements are summed: one
// vector for each way of storing them (FP8, or one plain dtype), the weights one after another, cut
// into equal numbers of elements, anywhere.
#pragma once

#include <string>
#include <vector>

#include "core/view.h"

namespace rowshard {

enum class Storage {
  kFp8Block,      // e4m3 codes, one fp32 scale per 128x128 block
  kPlain,         // elements of `dtype`, no scales
  kMxRowwise,     // e4m3 codes [N, K], then e8m0 scales, one per 1x32
  kMxColumnwise,  // the same of the columnwise copy, codes [K, N]
};
inline bool is_mx(Storage storage) {
  return storage == Storage::kMxRowwise || storage == Storage::kMxColumnwise;
}

/// Which part of a checkpoint's tensor a weight is, where tensor parallelism cuts it. Cuts of an
/// FP8 weight lie on borders of its blocks. A tensor of one dimension counts as a column.
struct TensorSlice {
  int64_t rows = 0, cols = 0;  // of the whole tensor; 0: the weight is the whole tensor
  int64_t row = 0, col = 0;    // where the weight begins in it

  bool is_whole() const { return rows == 0; }
  bool operator==(const TensorSlice&) const = default;
};

struct WeightSpec {
  std::string name;  // module path as in the checkpoint, without ".weight"
  Shape shape;       // [N, K] for a linear weight, [H] for a norm; of the slice
  Storage storage = Storage::kPlain;
  DType dtype = DType::kBF16;  // kE4M3 unless plain
  bool trainable = false;      // kFp8Block or kPlain only
  TensorSlice slice{};

  int64_t elements() const { return shape.elements(); }
  /// In the unit's buffer: elements, and for MX padding and scales.
  int64_t bytes() const;
  Shape mx_scale_shape() const;
  int64_t mx_scale_offset() const;  // from the weight's first byte
  bool operator==(const WeightSpec&) const = default;
};

/// Trainable weights of a unit that are stored alike.
struct TrainableLayout {
  Storage storage;
  DType dtype;
  std::vector<int> weights;      // of the unit
  std::vector<int64_t> offsets;  // elements from the vector's start, by position in `weights`
  int64_t part = 0;              // elements of every rank, padding included
};

class UnitLayout {
 public:
  UnitLayout(std::string name, std::vector<WeightSpec> weights, int ranks);

  const std::string& name() const { return name_; }
  const std::vector<WeightSpec>& weights() const { return weights_; }
  int ranks() const { return ranks_; }

  /// Bytes from the buffer's start; of a trainable weight -1.
  int64_t offset(int weight) const { return offsets_[weight]; }
  const std::vector<TrainableLayout>& trainable() const { return trainable_; }
  int64_t shard_bytes() const { return shard_bytes_; }  // of every rank, padding included
  int64_t gathered_bytes() const { return shard_bytes_ * ranks_; }
  /// What gathering takes beside the shards: the frozen buffer and the trainable vectors; nothing
  /// with one rank.
  int64_t transient_bytes() const;
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
  void add_trainable(int weight);

  std::string name_;
  std::vector<WeightSpec> weights_;
  std::vector<int64_t> offsets_;
  std::vector<TrainableLayout> trainable_;
  int ranks_;
  int64_t shard_bytes_ = 0;
};

}  // namespace rowshard
