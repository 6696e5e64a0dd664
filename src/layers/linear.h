// The linear layer  y = x · Wᵀ + bias + s · B · A · dropout(x),  frozen or trainable, its weight
// FP8 or plain, with an optional adapter.
//
// With an FP8 weight all base products run in FP8: fprop reads the rowwise copy and x quantised
// 1×128, dgrad the columnwise copy and dy quantised 1×128, wgrad (only when the weight has
// somewhere to put its gradient) x and dy quantised along the tokens. layers/linear_plan.h says
// which of these a call makes and keeps.
//
// There is no tape: forward fills a plain `saved`, backward reads it. saved null: no backward
// follows, nothing is kept. Views in `saved` are the caller's memory, which must live until the
// backward (until the weight gradient, when that is delayed). Everything is queued on ctx.stream;
// scratch is arena workspace, released on return. Every operand is checked before anything is
// queued or changed: ShapeError, UsageError, LogicError and ConfigError name the weight.
//
// The layer may be captured in a graph. A copy that is missing under `release` is then recorded as
// rebuild, product and release in scratch of the graph's own arena; one that is there is read and
// pinned; under `resident` a missing one is a UsageError, because a replay runs no host code.
#pragma once

#include <memory>

#include "layers/linear_plan.h"
#include "layers/lora.h"
#include "layers/quantized_input.h"
#include "layers/weight.h"

namespace rowshard {

/// A linear layer in one step: a weight and what hangs on it. Owns nothing.
struct Linear {
  const LinearWeight* weight = nullptr;
  const LoraFactors* lora = nullptr;
  Dropout dropout = {};                                      // of the adapter
  ColumnwisePolicy columnwise = ColumnwisePolicy::kRelease;  // while the weight is frozen
  BackwardOverride backward_override = BackwardOverride::kNone;
  bool delay_weight_gradient = false;  // backward leaves it to linear_weight_gradient
};

/// What a weight gradient still needs when it was delayed.
struct DelayedGradient {
  ConstView dy;  // [T, N]
  QuantizedActivation dy8;
  bool waiting = false;
};

struct LinearSaved {
  std::shared_ptr<LinearInput> input;  // in the forms of the plan; null when nothing is kept
  LoraSaved lora;
  DelayedGradient delayed;
};

/// y [T, N] from x [T, K]; one dtype: f64 (host, plain f64 weights only), f32 or bf16. A plain
/// weight of another float dtype is converted into scratch.
void linear_forward(const View& y, const ConstView& x, const Linear& linear, LinearSaved* saved,
                    Context& ctx);

/// dx [T, K] = dy · W + adapter (or dx += with accumulate_dx); the adapter's gradients, the bias
/// gradient and, unless it is delayed, the weight's gradient. A dx without data asks for no dgrad,
/// and no columnwise copy is made. dx may be dy when N = K, the backward is FP8 and nothing is
/// trained: dy is read once, by its quantiser.
void linear_backward(const View& dx, const ConstView& dy, LinearSaved& saved, const Linear& linear,
                     bool accumulate_dx, Context& ctx);

/// The weight gradient that a backward has delayed, and the end of what was saved for it.
/// LogicError for a frozen weight, or when none is waiting.
void linear_weight_gradient(LinearSaved& saved, const Linear& linear, Context& ctx);

// -- For the modules that make x themselves, once for several layers.

/// The plan of this call. `forward`: made before fprop, where dgrad is taken for granted.
LinearPlan plan_of(const Linear& linear, bool backward, bool dgrad, bool input_again, Context& ctx);
/// How activations are grouped for the FP8 weights among these; nullopt: none is FP8. ConfigError
/// when 128-blocks and MX would read the same x.
std::optional<Grouping> activation_grouping(std::initializer_list<const Linear*> readers);

// Everything that could be refused, before anything is queued or changed. The functions of this
// header check for themselves; a module checks all its layers before it runs the first.
void check_forward(const ConstView& y, const ConstView& x, const Linear& linear, Context& ctx);
/// All but x, which the module makes. dx or dy may have a shape and no data yet.
void check_backward(const View& dx, const ConstView& dy, const LinearSaved& saved,
                    const Linear& linear, const LinearPlan& plan, Context& ctx);
/// Of linear_backward: x as it was saved, too.
void check_linear_backward(const View& dx, const ConstView& dy, const LinearSaved& saved,
                           const Linear& linear, Context& ctx);

/// As linear_forward and linear_backward, with x in the forms that the plan asks for.
void project_forward(const View& y, const LinearInput& input, const Linear& linear,
                     LinearSaved* saved, Context& ctx);
void project_backward(const View& dx, const ConstView& dy,
                      const std::shared_ptr<LinearInput>& input, LinearSaved& saved,
                      const Linear& linear, const LinearPlan& plan, bool accumulate_dx,
                      Context& ctx);

}  // namespace rowshard
