// Token embedding: a row of the table for every id. The table is frozen: there is no backward.
#pragma once

#include <span>

#include "core/view.h"

namespace rowshard {

/// Throws ShapeError naming the first id outside [0, vocabulary) and its place. Called where ids
/// enter the program, because a kernel cannot say what was wrong.
void check_ids(std::span<const int32_t> ids, int64_t vocabulary);

/// y [T, H] = table[ids[t], :].  table [V, H]; ids [T] i32, each in [0, V). y has the table's dtype
/// (f64 host only, f32, bf16), or f32 for a bf16 table. The host throws on an id that is out of
/// range; on cuda such a row becomes NaN.
void embedding_lookup(const View& y, const ConstView& table, const ConstView& ids, Stream& stream);

/// The same from rows [first, first + V) of a table of `vocabulary` rows: a token of another row
/// becomes a row of zeros, so that the sum over the ranks that hold the parts is the lookup, exact.
void embedding_lookup_part(const View& y, const ConstView& part, int64_t first, int64_t vocabulary,
                           const ConstView& ids, Stream& stream);

}  // namespace rowshard
