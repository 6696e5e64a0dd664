#include "layers/parallel_products.h"

#include <numeric>

#include "core/matmul.h"
#include "fp8/dgrad_rowwise.h"
#include "fp8/gemm.h"
#include "fp8/quantize.h"
#include "layers/elementwise.h"

namespace rowshard {

namespace {

QuantizedActivation empty_panel(int64_t rows, int64_t cols, Category category, Context& ctx) {
  return allocate_rowwise({rows, cols}, Grouping::k1x128, category, "tp.rows8", ctx);
}

void quantize_into(const QuantizedActivation& panel, const ConstView& x, Context& ctx) {
  const Fp8View view = panel.rowwise();
  if (x.dim(0) > 0)
    quantize(&view, nullptr, x, {}, ctx.stream);
}

}  // namespace

RowGroups::RowGroups(std::span<const int64_t> counts, int64_t tokens, int experts,
                     const TensorParallel& tp)
    : tokens_(tokens),
      experts_(experts),
      ranks_(tp.size()),
      rank_(tp.rank()),
      sequence_(tp.sequence) {
  const int64_t share = tp.share(tokens);
  ROWSHARD_CHECK(counts.empty() ? experts == 1 : std::ssize(counts) == int64_t{ranks_} * experts,
                 ShapeError, counts.size(), " row counts for ", experts, " experts on ", ranks_,
                 " tensor-parallel ranks; wanted one for each of both");
  int64_t first = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    for (int expert = 0; expert < experts; ++expert) {
      const int64_t rows = counts.empty() ? share : counts[rank * experts + expert];
      ROWSHARD_CHECK(rows >= 0, ShapeError, rows, " rows for expert ", expert, " on rank ", rank);
      groups_.push_back({first, rows, expert});
      first += rows;
      if (rows == 0)
        continue;
      if (!merged_.empty() && merged_.back().expert == expert) {
        merged_.back().rows += rows;
      } else {
        merged_.push_back(groups_.back());
      }
    }
    ROWSHARD_CHECK(first == share * (rank + 1), ShapeError, "the experts' rows of rank ", rank,
                   " add up to ", first - share * rank, "; each of ", ranks_,
                   " tensor-parallel ranks has ", share, " of ", tokens, " tokens");
  }
}

std::span<const RowGroup> RowGroups::of(int rank) const {
  return std::span(groups_).subspan(int64_t{rank} * experts_, experts_);
}

OwnRows::OwnRows(const ConstView& x, bool fp8, Context& ctx) {
  rows.plain = x;
  if (!fp8)
    return;
  panel = empty_panel(x.dim(0), x.dim(1), Category::kWorkspace, ctx);
  quantize_into(panel, x, ctx);
  rows.fp8 = panel.rowwise();
}

GatheredRows::GatheredRows(const ConstView& own, QuantizedActivation own8, const RowGroups& groups,
                           bool fp8, TensorParallel& tp, Context& ctx)
    : tp_(tp), groups_(groups), own_(own), fp8_(fp8) {
  const int64_t cols = own.dim(1);
  const bool quantized = fp8 && own8.codes;
  ROWSHARD_CHECK(own8.codes ? fp8 && groups.experts() == 1 : own.data || own.elements() == 0,
                 LogicError, "tokens for a ", fp8 ? "FP8" : "plain", " layer of ", groups.experts(),
                 " experts were given as ", own8.codes ? "codes" : "nothing");
  if (fp8) {
    // An expert's rows are a panel of their own: its scales begin where a product can read them.
    for (int rank = 0; rank < steps(); ++rank) {
      panels_.emplace_back();
      const bool mine = !tp.sequence || rank == tp.rank();
      for (const RowGroup& group : tp.sequence ? groups.of(rank) : groups.all()) {
        panels_.back().push_back(
            mine && quantized ? std::move(own8)
                              : empty_panel(group.rows, cols, Category::kCommunication, ctx));
      }
    }
    const auto& mine = panels_[tp.sequence ? tp.rank() : 0];
    for (size_t i = 0; i < mine.size() && !quantized; ++i) {
      const RowGroup& group = groups.residual()[i];
      quantize_into(mine[i], own.slice_rows(groups.residual_row(group), group.rows), ctx);
    }
  } else if (tp.sequence) {
    plain_ =
        ctx.arena.tensor(Category::kCommunication, "tp.tokens", own.dtype, {groups.tokens(), cols});
    copy(tp.part(plain_.view(), tp.rank()), own, ctx.stream);
  }
  if (!tp.sequence)
    return;
  RankParts parts(tp.size());
  for (int rank = 0; rank < tp.size(); ++rank) {
    if (!fp8) {
      parts[rank] = {tp.part(plain_.view(), rank)};
      continue;
    }
    for (const QuantizedActivation& panel : panels_[rank]) {
      parts[rank].push_back(panel.codes);
      parts[rank].push_back(panel.scales);
    }
  }
  gather_.emplace(tp, std::move(parts), ctx);
}

std::span<const RowGroup> GatheredRows::groups(int step) const {
  return gather_ ? groups_.of(source(step)) : groups_.all();
}

void GatheredRows::wait(int step) {
  if (gather_)
    gather_->wait(step);
}

Rows GatheredRows::rows(int step, size_t index) const {
  Rows rows;
  const RowGroup& group = groups(step)[index];
  if (fp8_) {
    rows.fp8 = panels_[source(step)][index].rowwise();
  } else {
    rows.plain = (gather_ ? ConstView(plain_) : own_).slice_rows(group.first, group.rows);
  }
  return rows;
}

Operand::Operand(const Linear& linear, DType dtype, Context& ctx)
    : weight_(*linear.weight), fp8_(weight_.quantized()), asked_(linear.columnwise), ctx_(ctx) {
  ROWSHARD_CHECK(!weight_.trainable(), LogicError, weight_.name,
                 ": tensor-parallel layers are frozen; train an adapter");
  ROWSHARD_CHECK(!fp8_ || fp8_->grouping() == Grouping::k128x128, ConfigError, weight_.name,
                 ": tensor parallelism is for 128x128 blocks and plain weights, not ",
                 to_string(fp8_->grouping()));
  plain_ = weight_.plain;
  if (!fp8_ && plain_.dtype != dtype) {
    converted_ = ctx.arena.tensor(Category::kWorkspace, "linear.converted", dtype, plain_.shape);
    convert(converted_, plain_, ctx.stream);
    plain_ = converted_;
  }
}

bool Operand::on_cuda() const {
  return ctx_.device().is_cuda() || (ctx_.device().is_plan() && ctx_.device().index > 0);
}

void Operand::forward(const View& y, const Rows& x, bool with_bias) const {
  const ConstView bias = with_bias ? weight_.bias : ConstView();
  const bool fused = bias.data && fp8_ && (!on_cuda() || bias.dtype == DType::kBF16);
  if (bias.data && !fused)
    broadcast_row(y, bias, ctx_.stream);
  const float beta = bias.data && !fused ? 1 : 0;
  if (fp8_) {
    GemmOptions options;
    options.beta = beta;
    if (fused)
      options.bias = bias;
    fp8_gemm(y, x.fp8, fp8_->rowwise(), options, ctx_);
    return;
  }
  matmul(y, x.plain, Transpose::kNo, plain_, Transpose::kYes, 1, beta, ctx_);
}

void Operand::prepare_dgrad(int64_t rows) {
  if (!fp8_)
    return;
  policy_ = columnwise_policy(asked_);
  // As in one rank's plan, by the rows of one product; either gives the same bits.
  direct_ =
      !fp8_->usage().columnwise && (policy_ == ColumnwisePolicy::kDirect ||
                                    (policy_ == ColumnwisePolicy::kAuto && rows <= kDirectTokens));
  if (!direct_)
    fp8_->update_usage(std::nullopt, true, ctx_);
}

void Operand::dgrad(const View& dx, const Rows& dy, float beta) const {
  if (fp8_ && direct_) {
    fp8_dgrad_rowwise(dx, dy.fp8, fp8_->rowwise(), beta, ctx_);
    return;
  }
  if (fp8_) {
    fp8_gemm(dx, dy.fp8, fp8_->columnwise(), {.beta = beta, .bias = std::nullopt}, ctx_);
    return;
  }
  matmul(dx, dy.plain, Transpose::kNo, plain_, Transpose::kNo, 1, beta, ctx_);
}

void Operand::release() {
  if (fp8_ && !direct_ && policy_ != ColumnwisePolicy::kResident)
    fp8_->update_usage(std::nullopt, false, ctx_);
}

}  // namespace rowshard
