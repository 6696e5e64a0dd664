// The experts of one mixture layer: expert e reads its own rows of x, which lie one after another.
//
// Row counts are a host list; an expert may have none, and then runs no product. Contracts are
// those of layers/linear.h, expert by expert.
#pragma once

#include <span>
#include <vector>

#include "layers/linear.h"

namespace rowshard {

struct GroupedLinearSaved {
  std::vector<int64_t> rows;
  std::vector<LinearSaved> experts;
};

/// y [T, N] from x [T, K]; rows[e] of them belong to expert e, and all add up to T. Every expert
/// has the same N and K.
void grouped_linear_forward(const View& y, const ConstView& x, std::span<const int64_t> rows,
                            std::span<const Linear> experts, GroupedLinearSaved* saved,
                            Context& ctx);
/// dx [T, K] from dy [T, N]; no data: no dgrad. The gradient of an expert without rows is left as
/// it is when accumulating, and zero otherwise.
void grouped_linear_backward(const View& dx, const ConstView& dy, GroupedLinearSaved& saved,
                             std::span<const Linear> experts, bool accumulate_dx, Context& ctx);
/// Those weight gradients that backward has delayed.
void grouped_linear_weight_gradient(GroupedLinearSaved& saved, std::span<const Linear> experts,
                                    Context& ctx);

}  // namespace rowshard
