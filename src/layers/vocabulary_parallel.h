// Embedding and head over a tensor-parallel group: each rank holds some rows of the vocabulary.
// Streams and collectives as in layers/parallel_linear.h.
#pragma once

#include "core/argument.h"
#include "layers/tensor_parallel.h"

namespace rowshard {

/// A rank's rows [first, first + V) of a frozen [vocabulary, H] table, embedding or head.
struct VocabularyPart {
  ConstView table;  // [V, H] T or bf16
  int64_t first = 0;
  int64_t vocabulary = 0;
};

/// y [residual rows, H] T = table[ids[t], :], exact: all but one rank add zeros. ids [T] i32.
void vocabulary_parallel_embedding(const View& y, const VocabularyPart& part, const ConstView& ids,
                                   TensorParallel& tp, Context& ctx);

/// Cross entropy of rows · tableᵀ with logits that stay split: of every row only three numbers
/// travel, besides the row itself and its gradient.
///   loss_sum [1] f64 += Σ loss, the same on every rank
///   rows     [n_r, H] T, with sequence parallelism those of this rank's tokens; otherwise all n
///   d_rows   like rows: = (∂ Σ loss / ∂ rows) · scale; null when no gradient is wanted
///   labels   [n] i32, of all ranks' rows in rank order; counts[r] of them are rank r's
/// `chunk` rows of logits are alive at once.
void vocabulary_parallel_loss(const View& loss_sum, const View* d_rows, const ConstView& rows,
                              const ConstView& labels, std::span<const int64_t> counts,
                              const VocabularyPart& head, Argument<double> scale, int64_t chunk,
                              TensorParallel& tp, Context& ctx);

/// logits [n, vocabulary] T of rows [n, H] T that every rank holds; widths[r] rows of the table are
/// rank r's.
void vocabulary_parallel_logits(const View& logits, const ConstView& rows,
                                const VocabularyPart& head, std::span<const int64_t> widths,
                                TensorParallel& tp, Context& ctx);

}  // namespace rowshard
