// Linear layers over a tensor-parallel group, frozen in FP8 or plain, with adapters.
//
//   column-parallel  W [N, K] cut by rows: q, k, v; gate, up. Reads the residual stream, leaves
//                    each rank its features of all tokens.
//   row-parallel     W [N, K] cut by columns: o; down. Reads a rank's features of all tokens, adds
//                    up the ranks' partial products, leaves the residual stream.
//
// The residual stream has a rank's own tokens with sequence parallelism, all tokens without; T is
// always all tokens. What travels (layers/tensor_parallel.h):
//   forward   column: x, quantised 1x128 where it lies: a group never leaves its token, so codes
//             and scales are those of quantising the whole, 0.52 of bf16; each rank's scales go to
//             the product as they came. Row: partial products, summed once.
//   backward  column: partial dx. Row: dy, quantised 1x128.
// x is never gathered again: W is frozen, and the adapters do without.
//
// Adapters, without another large transfer: A·x of a column-parallel layer is made from the rank's
// own tokens and gathered (T·r numbers for each adapter); B adds to the rank's own features. Of a
// row-parallel layer, A reads the rank's own features and B adds its partial result to the partial
// product before the one sum. Factors: a column-parallel layer's B and a row-parallel layer's A are
// cut with W and their gradients are complete on their rank. The other factor is whole on every
// rank. Its gradient is, with sequence parallelism, of the rank's own tokens: the caller adds up
// the ranks', exactly once. Without it, it is complete and the same on all ranks.
//
// Linear::weight and ::lora are this rank's part; the bias of a row-parallel layer is whole.
// Weights are frozen here. Dropout masks are those of one rank that holds everything:
// Linear::dropout is of all tokens, and of a row-parallel layer says which features of the whole x
// has. Queued on ctx.stream and tp.stream; what is returned may be used on ctx.stream. Collective
// over the group.
#pragma once

#include <span>
#include <vector>

#include "layers/linear.h"
#include "layers/tensor_parallel.h"

namespace rowshard {

/// What backward needs besides x.
struct ParallelSaved {
  std::vector<Tensor> xa;  // by layer; empty without an adapter
                           // column: [T, r]. row: [residual rows, r], summed over the group
};

/// ys[i] [T, Ni] = x · Wiᵀ (+ bias) (+ adapter) for the layers that read one x [residual rows, K].
/// saved may be null when no backward follows.
///
/// With experts, a layer is E of them, layers[i · E + e], all with one N, K and rank of adapter,
/// and `rows` [rank][expert] says how many of each rank's T/p tokens every expert multiplies: a
/// rank's tokens lie expert by expert, so that all T lie rank by rank and within that expert by
/// expert. That is the order of a GroupedLinear with p · E experts, of which every E-th is the
/// same, and whose results these are. Counts may be zero.
///
/// x8 is x quantised 1x128 by the kernel that made it, for layers in FP8 without experts; x has no
/// data then unless an adapter reads it.
void column_parallel_forward(std::span<const View> ys, const ConstView& x,
                             std::span<const Linear> layers, ParallelSaved* saved,
                             TensorParallel& tp, Context& ctx, std::span<const int64_t> rows = {},
                             QuantizedActivation x8 = {});

/// dx [residual rows, K] = Σ dys[i] · Wi + adapters, complete, and the adapters' gradients +=
/// theirs. A dx without data asks for the adapters' gradients only. x as in forward; read by
/// adapters only.
void column_parallel_backward(const View& dx, std::span<const ConstView> dys, const ConstView& x,
                              std::span<const Linear> layers, const ParallelSaved& saved,
                              TensorParallel& tp, Context& ctx, std::span<const int64_t> rows = {});

/// y [residual rows, N] = Σ over ranks x [T, K/p] · Wᵀ (+ bias, once) (+ adapter); one layer, or
/// its E experts.
void row_parallel_forward(const View& y, const ConstView& x, std::span<const Linear> experts,
                          ParallelSaved* saved, TensorParallel& tp, Context& ctx,
                          std::span<const int64_t> rows = {});

/// dx [T, K/p] = dy [residual rows, N] · W + adapter; the rest as above.
void row_parallel_backward(const View& dx, const ConstView& dy, const ConstView& x,
                           std::span<const Linear> experts, const ParallelSaved& saved,
                           TensorParallel& tp, Context& ctx, std::span<const int64_t> rows = {});

}  // namespace rowshard
