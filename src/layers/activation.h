// The activations of an MLP, alone or together with the 1×128 quantiser of the product that
// follows.
//
//   kSwiGlu  y = silu(gate) · up        silu(g) = g · σ(g)
//   kGeGlu   y = gelu(gate) · up        gelu(g) = g · σ(2 √(2/π) (g + 0.044715 g³)), the tanh form
//   kGelu    y = gelu(gate)             no up
//
// σ(z) = 1 / (1 + exp(−z)). Computed in f32 (f64 for f64), rounded once. All operands have one
// dtype (f64 host only, f32, bf16) and one shape [T, F]. Queued on the stream, no allocation.
// ShapeError names the operands that do not fit.
#pragma once

#include "fp8/fp8_view.h"

namespace rowshard {

enum class Activation { kSwiGlu, kGeGlu, kGelu };
const char* to_string(Activation activation);  // "swiglu", "geglu", "gelu"
constexpr bool is_gated(Activation activation) {
  return activation != Activation::kGelu;
}

/// y may be gate or up, or have no data when only the codes are wanted. y8, 1×128 e4m3 of y, or
/// null: the bytes that quantize() makes of y. up has no data for kGelu.
void activation_forward(const View& y, const Fp8View* y8, const ConstView& gate,
                        const ConstView& up, Activation activation, Stream& stream);

/// With f the function of the gate: dgate = dy · up · f'(gate), dup = dy · f(gate). dgate may be
/// gate or dy, and dup may be up or dy: each element is read before it is written. up and dup have
/// no data for kGelu.
void activation_backward(const View& dgate, const View& dup, const ConstView& dy,
                         const ConstView& gate, const ConstView& up, Activation activation,
                         Stream& stream);

}  // namespace rowshard
