// What tensor-parallel layers share: the group, how tokens lie over it, and the two movements of
// tokens that a layer needs, each in steps that overlap with the products around them.
//
// The T tokens of a micro-batch are cut into p equal runs of neighbours, one a rank. With sequence
// parallelism a rank's residual stream, norms and dropout hold only its own T/p tokens, and
//   a column-parallel layer  gathers tokens before its product   (TokenGather)
//   a row-parallel layer     sums partial products and leaves each rank its tokens  (TokenReduce)
// Without it every rank holds all tokens between layers: nothing is gathered before a product, and
// the sums of TokenReduce are gathered after it, which together is an all-reduce.
//
// Every step is one exchange with the rank at distance i (send to rank + i, receive from rank − i):
// between GPUs that all see each other no link is used twice, and a partial sum is added up by the
// rank that keeps it, in rank order, in f32 with one rounding. So the result does not depend on
// timing, on `overlap`, or on which rank computes it.
#pragma once

#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/wait_clock.h"
#include "core/arena.h"

namespace rowshard {

struct TensorParallel {
  Communicator& group;     // of its own; every rank runs the same layers in the same order
  Stream& stream;          // where exchanges run, beside the compute stream
  bool sequence = true;    // tokens are split between layers
  bool overlap = true;     // off: every exchange is waited for at once; for comparison, same bits
  bool wide_sums = false;  // partial products travel and are summed in f32, not in T
  WaitClock waits;         // how long compute stood waiting for exchanges

  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  /// Tokens a rank owns; ShapeError unless the group divides `tokens`.
  int64_t share(int64_t tokens) const;
  /// Rows that a tensor of the residual stream has.
  int64_t residual_rows(int64_t tokens) const { return sequence ? share(tokens) : tokens; }
  /// Rank `rank`'s rows of a tensor of all tokens.
  View part(const View& whole, int rank) const;
  ConstView part(const ConstView& whole, int rank) const;
};

/// Buffers of each rank's tokens: [rank][buffer], the same number of buffers for every rank. Ranks
/// may differ in rows.
using RankParts = std::vector<std::vector<View>>;

/// Every rank's tokens on their way to every rank. This rank's buffers must have been filled by
/// work queued on ctx.stream; all buffers live until the last wait has been queued.
class TokenGather {
 public:
  TokenGather(TensorParallel& tp, RankParts parts, Context& ctx);
  /// Step i = 0 … p−1 brings the tokens of this rank: its own first.
  int rank_at(int step) const { return (tp_.rank() - step + tp_.size()) % tp_.size(); }
  /// Work queued on ctx.stream from now on may read the tokens of step i.
  void wait(int step);
  void wait_all();

 private:
  TensorParallel& tp_;
  Context& ctx_;
  std::vector<Event> arrivals_;  // by step − 1; empty once waited for
};

/// Partial sums of every rank's tokens on their way to their rank. Received parts are arena
/// memory of category communication; this rank's partial sums live until `finish` has returned.
class TokenReduce {
 public:
  TokenReduce(TensorParallel& tp, RankParts partials, Context& ctx);
  /// The order in which partial sums should be made: those of other ranks first, so that they
  /// travel while the rest is made.
  int rank_at(int step) const { return (tp_.rank() + 1 + step) % tp_.size(); }
  /// The partial sums for rank_at(step) are made by the work queued so far. Steps in order.
  void send(int step);
  /// sums[buffer] = Σ over the ranks, in rank order, of this rank's rows; the first has `bias` [N]
  /// added in the same rounding (no data: none). dtype: that of the partial sums, or T for f32.
  void finish(std::span<const View> sums, const ConstView& bias = {});

 private:
  void exchange(int step);

  TensorParallel& tp_;
  Context& ctx_;
  RankParts partials_;
  std::vector<std::vector<Tensor>> received_;  // [step][buffer]
  std::vector<Event> arrivals_;
  int sent_ = 0;
};

/// y [n, H] = Σ parts[i] in that order, + bias [H] if it has data; summed in f32 (f64 for f64) and
/// rounded once. Parts share a dtype, y's or f32; at most kMostParts of them. y may be a part.
inline constexpr int kMostParts = 64;
void sum_parts(const View& y, std::span<const ConstView> parts, const ConstView& bias,
               Stream& stream);

}  // namespace rowshard
