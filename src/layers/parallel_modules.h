// LayerNormLinear and LayerNormMlp over a tensor-parallel group: the two halves of a decoder block.
//
// The norm works on this rank's tokens of the residual stream; its output is gathered as FP8 and
// never kept: backward makes it again where an adapter reads it. Norms and weights are frozen. What
// the structs' Linears hold, streams and collectives: layers/parallel_linear.h.
#pragma once

#include "layers/layer_norm_mlp.h"
#include "layers/parallel_linear.h"

namespace rowshard {

struct ParallelNormSaved {
  Tensor statistics;
  ParallelSaved linears;
};

/// ys[i] [T, Ni] = linear_i(norm(x)), x [residual rows, H].
void parallel_norm_linear_forward(std::span<const View> ys, const ConstView& x,
                                  const LayerNormLinear& layer, ParallelNormSaved& saved,
                                  TensorParallel& tp, Context& ctx);
/// dx [residual rows, H] += the gradient by all dys; without data only the adapters get theirs.
void parallel_norm_linear_backward(const View& dx, std::span<const ConstView> dys,
                                   const ConstView& x, const LayerNormLinear& layer,
                                   const ParallelNormSaved& saved, TensorParallel& tp,
                                   Context& ctx);

struct ParallelMlpSaved {
  ParallelNormSaved first;
  Tensor gate, up;  // [T, F/p]
  ParallelSaved down;
};

/// y [residual rows, H], x likewise.
void parallel_norm_mlp_forward(const View& y, const ConstView& x, const LayerNormMlp& layer,
                               ParallelMlpSaved& saved, TensorParallel& tp, Context& ctx);
/// dx += the gradient by dy, which may be dx. A dx without data asks for the adapters' only.
void parallel_norm_mlp_backward(const View& dx, const ConstView& dy, const ConstView& x,
                                const LayerNormMlp& layer, ParallelMlpSaved& saved,
                                TensorParallel& tp, Context& ctx);

}  // namespace rowshard
