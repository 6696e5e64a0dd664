#include "layers/grouped_linear.h"

#include <numeric>

#include "layers/dispatch.h"

namespace rowshard {

namespace {

void check_rows(const char* operation, int64_t tokens, std::span<const int64_t> rows,
                std::span<const Linear> experts) {
  std::string counts;
  bool negative = false;
  for (int64_t count : rows) {
    counts += message(counts.empty() ? "" : ", ", count);
    negative = negative || count < 0;
  }
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  ROWSHARD_CHECK(!negative && rows.size() == experts.size() && total == tokens, ShapeError,
                 operation, ": rows [", counts, "] of ", rows.size(), " experts add up to ", total,
                 "; wanted ", experts.size(), " counts that add up to ", tokens, " tokens");
}

}  // namespace

void grouped_linear_forward(const View& y, const ConstView& x, std::span<const int64_t> rows,
                            std::span<const Linear> experts, GroupedLinearSaved* saved,
                            Context& ctx) {
  check_rows("grouped_linear_forward", x.dim(0), rows, experts);
  check_operands(y.dim(0) == x.dim(0), "grouped_linear_forward", "y [T, N] and x [T, K]",
                 {{"y", y}, {"x", x}});
  // All experts before the first is run.
  int64_t first = 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    check_forward(y.slice_rows(first, rows[e]), x.slice_rows(first, rows[e]), experts[e], ctx);
    first += rows[e];
  }
  if (saved) {
    *saved = {};
    saved->rows.assign(rows.begin(), rows.end());
    saved->experts.resize(experts.size());
  }
  first = 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    Linear expert = experts[e];
    expert.dropout.first_token += first;
    linear_forward(y.slice_rows(first, rows[e]), x.slice_rows(first, rows[e]), expert,
                   saved ? &saved->experts[e] : nullptr, ctx);
    first += rows[e];
  }
}

void grouped_linear_backward(const View& dx, const ConstView& dy, GroupedLinearSaved& saved,
                             std::span<const Linear> experts, bool accumulate_dx, Context& ctx) {
  check_rows("grouped_linear_backward", dy.dim(0), saved.rows, experts);
  check_operands(!dx.data || dx.dim(0) == dy.dim(0), "grouped_linear_backward",
                 "dx [T, K] and dy [T, N]", {{"dx", dx}, {"dy", dy}});
  int64_t first = 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t rows = saved.rows[e];
    check_linear_backward(dx.data ? dx.slice_rows(first, rows) : View(), dy.slice_rows(first, rows),
                          saved.experts[e], experts[e], ctx);
    first += rows;
  }
  first = 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t rows = saved.rows[e];
    linear_backward(dx.data ? dx.slice_rows(first, rows) : View(), dy.slice_rows(first, rows),
                    saved.experts[e], experts[e], accumulate_dx, ctx);
    first += rows;
  }
}

void grouped_linear_weight_gradient(GroupedLinearSaved& saved, std::span<const Linear> experts,
                                    Context& ctx) {
  for (size_t e = 0; e < saved.experts.size(); ++e) {
    if (saved.experts[e].delayed.waiting)
      linear_weight_gradient(saved.experts[e], experts[e], ctx);
  }
}

}  // namespace rowshard
