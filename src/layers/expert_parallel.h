// Experts over ranks: every expert of a mixture layer is whole on one rank of a group, which
// multiplies the rows that all ranks have for it. Rows travel there and back, weights and gradients
// never: no sum crosses ranks, so a layer has the bits of one rank that holds everything, and
// whatever one rank can do (train, MX weights, dropout) works. The other way to spread experts is
// to cut each of them: layers/parallel_linear.h.
//
//   forward    to_experts(rows, x);   grouped_linear_forward(…, place.rows(), …);  from_experts(y,
//   …) backward   to_experts(d_rows, dy); grouped_linear_backward(…); from_experts(dx, …)
//
// A rank's x lies expert by expert. At the experts, all rows of one expert lie together, those of
// rank 0 first: no permutation is needed on either side. Rows travel in their own dtype, because
// adapters and weight gradients read them so. Collective over the group; queued on ctx.stream and
// tp.stream, and what is returned may be used on ctx.stream.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "layers/tensor_parallel.h"

namespace rowshard {

class ExpertPlaces {
 public:
  /// counts [rank][expert]: rows that a rank has for an expert, the same list on every rank; may be
  /// zero. Rank r of p holds the experts [E·r/p, E·(r+1)/p). ShapeError for a list that does not
  /// fit.
  ExpertPlaces(std::span<const int64_t> counts, int experts, TensorParallel& tp);

  int first_expert() const { return first(tp_.rank()); }
  int experts() const { return first(tp_.rank() + 1) - first(tp_.rank()); }
  /// Rows of each expert here, from all ranks; what GroupedLinear takes.
  const std::vector<int64_t>& rows() const { return rows_; }
  int64_t expert_rows() const { return expert_rows_; }
  /// Rows of this rank's x.
  int64_t own_rows() const { return own_rows_; }
  /// Of row 0 at the experts, in the order of one rank that holds them all: for dropout masks.
  int64_t first_row() const { return first_row_; }

  /// at_experts [expert_rows, H] = everybody's own [own_rows, H].
  void to_experts(const View& at_experts, const ConstView& own, Context& ctx);
  /// own [own_rows, H] = everybody's at_experts [expert_rows, H].
  void from_experts(const View& own, const ConstView& at_experts, Context& ctx);

 private:
  int first(int rank) const { return experts_ * rank / tp_.size(); }
  /// The rows that `source` has for the experts of `holder`, expert by expert: in the source's own
  /// tensor, and in the holder's.
  template <typename V>
  std::vector<V> own_slices(const V& own, int source, int holder) const;
  template <typename V>
  std::vector<V> expert_slices(const V& at_experts, int source, int holder) const;
  using Slices = std::function<std::vector<ConstView>(int peer)>;
  using Places = std::function<std::vector<View>(int peer)>;
  void travel(const Slices& send, const Places& receive, Context& ctx);
  void check(const char* operation, const ConstView& own, const ConstView& at_experts) const;

  TensorParallel& tp_;
  std::vector<int64_t> counts_;
  int experts_;
  int most_experts_ = 0;  // of any rank
  std::vector<int64_t> rows_;
  int64_t expert_rows_ = 0, own_rows_ = 0, first_row_ = 0;
};

}  // namespace rowshard
