// Small operations on whole tensors. dtypes f64 (host only), f32, bf16; computed in f32 (f64 for
// f64) and rounded once. Shapes and dtypes of one call agree unless said otherwise.
#pragma once

#include "core/arena.h"

namespace rowshard {

/// c = a + b; c may be a or b.
void add(const View& c, const ConstView& a, const ConstView& b, Stream& stream);
/// x *= factor.
void scale(const View& x, double factor, Stream& stream);

/// y [T, N] = row for every row (a bias, before the product adds to it).  row [N].
void broadcast_row(const View& y, const ConstView& row, Stream& stream);

/// y [n, H] = x[rows[i], :].  x [T, H], rows [n] i32 in [0, T).
void gather_rows(const View& y, const ConstView& x, const ConstView& rows, Stream& stream);
/// x[rows[i], :] += y[i, :]; rows must be distinct, so that no order of additions shows.
void scatter_add_rows(const View& x, const ConstView& y, const ConstView& rows, Stream& stream);

/// result [1] f64 = Σ x² (or += with `accumulate`), x any shape: fixed chunks are summed in f64,
/// then the chunks in order; the same bits at every thread and block count, and on both devices.
void sum_of_squares(const View& result, const ConstView& x, bool accumulate, Context& ctx);
/// result [1] f64 = Σ x, in the same way.
void sum(const View& result, const ConstView& x, bool accumulate, Context& ctx);

/// count [1] i32 = how many elements are NaN or infinite (or += with `accumulate`).
void count_nonfinite(const View& count, const ConstView& x, bool accumulate, Context& ctx);

}  // namespace rowshard
