// The pieces that parallel_linear.cpp is made of: which rows an expert multiplies, rows as a
// product reads them, and a weight while its products of several steps run. For the sources of this
// room.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "layers/linear.h"
#include "layers/tensor_parallel.h"

namespace rowshard {

/// Neighbouring rows of a tensor of all tokens that one expert multiplies.
struct RowGroup {
  int64_t first, rows;
  int expert;
};

/// All T rows in their order: those of rank 0, expert by expert, those of rank 1, … A layer without
/// experts has one, which multiplies everything.
class RowGroups {
 public:
  /// counts [rank][expert], or empty for a layer without experts. ShapeError unless every rank's
  /// add up to its share of `tokens`.
  RowGroups(std::span<const int64_t> counts, int64_t tokens, int experts, const TensorParallel& tp);

  int experts() const { return experts_; }
  int64_t tokens() const { return tokens_; }
  /// A rank's, one for each expert, also when that has no rows.
  std::span<const RowGroup> of(int rank) const;
  /// Everybody's that have rows; neighbours of one expert are one.
  std::span<const RowGroup> all() const { return merged_; }
  /// Those of a tensor of the residual stream, and where in it a group begins.
  std::span<const RowGroup> residual() const { return sequence_ ? of(rank_) : all(); }
  int64_t residual_row(const RowGroup& group) const {
    return group.first - (sequence_ ? tokens_ / ranks_ * rank_ : 0);
  }

 private:
  int64_t tokens_;
  int experts_, ranks_, rank_;
  bool sequence_;
  std::vector<RowGroup> groups_, merged_;
};

/// A run of rows as a product reads them.
struct Rows {
  ConstFp8View fp8;  // when the weight is
  ConstView plain;
};

/// Some rows of a tensor of this rank, quantised for a product if need be.
struct OwnRows {
  QuantizedActivation panel;
  Rows rows;

  OwnRows(const ConstView& x, bool fp8, Context& ctx);
};

/// A tensor of the residual stream as products over all tokens read it, step by step: with sequence
/// parallelism the ranks' tokens as they arrive, without it everything in one step.
class GatheredRows {
 public:
  /// own8: `own` as FP8 if that is there already; then `own` may have no data.
  GatheredRows(const ConstView& own, QuantizedActivation own8, const RowGroups& groups, bool fp8,
               TensorParallel& tp, Context& ctx);

  int steps() const { return tp_.sequence ? tp_.size() : 1; }
  /// The rows of a tensor of all tokens that a step is about.
  std::span<const RowGroup> groups(int step) const;
  /// Before the first `rows` of a step.
  void wait(int step);
  /// Those of the step's group number `index`.
  Rows rows(int step, size_t index) const;

 private:
  int source(int step) const { return gather_ ? gather_->rank_at(step) : 0; }

  TensorParallel& tp_;
  const RowGroups& groups_;
  ConstView own_;
  bool fp8_;
  std::vector<std::vector<QuantizedActivation>> panels_;  // [rank, or 0][group]
  Tensor plain_;                                          // [T, K]
  std::optional<TokenGather> gather_;
};

/// A frozen weight while its products of several steps run.
class Operand {
 public:
  Operand(const Linear& linear, DType dtype, Context& ctx);

  /// y = x · Wᵀ (+ bias)
  void forward(const View& y, const Rows& x, bool with_bias) const;
  /// Before a dgrad of that many rows at once; `release` after the last.
  void prepare_dgrad(int64_t rows);
  /// dx [rows, K] = dy [rows, N] · W + beta · dx
  void dgrad(const View& dx, const Rows& dy, float beta) const;
  void release();

 private:
  bool on_cuda() const;

  const LinearWeight& weight_;
  Fp8Matrix* fp8_;
  ColumnwisePolicy asked_, policy_ = ColumnwisePolicy::kRelease;
  bool direct_ = false;
  Context& ctx_;
  Tensor converted_;
  ConstView plain_;
};

}  // namespace rowshard
