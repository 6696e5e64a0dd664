// SwiGLU: y = silu(gate) · up, silu(g) = g / (1 + exp(−g)); computed in f32 (f64 for f64), rounded
// once. All operands have one dtype (f64 host only, f32, bf16) and one shape.
#pragma once

#include "core/view.h"

namespace rowshard {

/// y may be gate or up.
void swiglu(const View& y, const ConstView& gate, const ConstView& up, Stream& stream);

/// dgate = dy · up · s · (1 + g · (1 − s)),  dup = dy · silu(g),  s = 1 / (1 + exp(−g)).
/// dgate may be gate and dup may be up or dy: each element is read before it is written.
void swiglu_backward(const View& dgate, const View& dup, const ConstView& dy, const ConstView& gate,
                     const ConstView& up, Stream& stream);

}  // namespace rowshard
