// The model's weights as units: what is gathered together, under which names, stored how.
//
//   unit 0           embedding (and the final norm when the head is tied: they are used together)
//   unit 1 … L       decoder blocks
//   unit L + 1       final norm and head, when the head is not tied
//   then L units     columnwise copies of the blocks with MX weights, and the norms backward reads
//
// Linear weights of the blocks are FP8 or bf16 by the recipe; embedding and head stay bf16; norms
// and biases are held in the dtype of the activations, which widens bf16 exactly.
#pragma once

#include <array>

#include "model/decoder_slice.h"
#include "shard/unit_layout.h"
#include "shard/usage_plan.h"

namespace rowshard {

/// Where a block's weights are inside its unit; -1 when the family has none.
struct BlockIndices {
  int input_norm = -1, post_norm = -1;
  int q_norm = -1, k_norm = -1;
  std::array<int, 7> linear{};  // in the order of ModelConfig::linears()
  std::array<int, 7> bias{};
};

class DecoderUnits {
 public:
  /// `linear` is kFp8Block, kMxRowwise or kPlain; `activations` f32 or bf16; `ranks` is dp_shard;
  /// `slice` what this tensor-parallel rank holds.
  DecoderUnits(const ModelConfig& config, const DecoderSlice& slice, Storage linear,
               DType activations, int ranks);

  const std::vector<UnitLayout>& layouts() const { return layouts_; }
  int count() const { return static_cast<int>(layouts_.size()); }
  int embedding() const { return 0; }
  int block(int64_t layer) const { return static_cast<int>(layer) + 1; }
  int head() const { return tied_ ? 0 : static_cast<int>(layers_) + 1; }
  /// What backward reads of a block: a unit of its own with MX weights, else the block.
  int backward_block(int64_t layer) const {
    return block(layer) + (mx_ ? first_columnwise_ - 1 : 0);
  }
  bool mx() const { return mx_; }

  const BlockIndices& block_indices() const { return block_; }
  const BlockIndices& backward_indices() const { return mx_ ? columnwise_ : block_; }
  int embedding_table() const { return 0; }         // in unit embedding()
  int final_norm() const { return final_norm_; }    // in unit head()
  int head_matrix() const { return head_matrix_; }  // in unit head()

  /// The model's order of uses. Backward stops at block `lowest_block`, the lowest with an adapter;
  /// with `recompute` it begins each block with its forward.
  std::vector<UnitUse> training_uses(int64_t lowest_block, bool recompute) const;
  std::vector<UnitUse> forward_uses() const;

 private:
  int64_t layers_;
  bool tied_, mx_;
  int first_columnwise_ = 0;
  int final_norm_ = 0, head_matrix_ = 0;
  BlockIndices block_, columnwise_;
  std::vector<UnitLayout> layouts_;
};

}  // namespace rowshard
