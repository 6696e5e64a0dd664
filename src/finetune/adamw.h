// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019) on one flat f32
// vector, in the order of operations of torch.optim.AdamW:
//   g  = gradient_scale * gradient
//   p *= 1 - lr * weight_decay
//   m  = beta1 * m + (1 - beta1) * g
//   v  = beta2 * v + (1 - beta2) * g²
//   p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + epsilon)
// and, when asked for, compute = bf16(p) in the same pass.
//
// A gradient scale that is not finite means that this step's gradient is worthless: then nothing is
// changed. It is read on the device, so neither clipping nor this decision makes the host wait.
//
// Every element is computed by one function on both devices, with each rounding written out: host
// and cuda agree bit for bit. Queued on `stream`, no host wait; may be captured: replays take lr
// and step from where the constants lie (core/argument.h).
#pragma once

#include "core/argument.h"
#include "core/view.h"

namespace rowshard {

struct AdamW {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
};

/// What an update makes of the hyper-parameters and the step, rounded once from f64.
struct AdamWConstants {
  float decay;  // 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;         // lr / (1 - beta1^step)
  float sqrt_correction2;  // sqrt(1 - beta2^step)
  float epsilon;
};
/// `step` counts from 1. LogicError for a step below 1 or hyper-parameters out of range.
AdamWConstants adamw_constants(const AdamW& hyper, int64_t step);

/// All of one length, on one device, borrowed; no two may overlap.
struct AdamWVectors {
  View parameters;             // [n] f32
  ConstView gradients;         // [n] f32
  View m;                      // [n] f32, zero before step 1
  View v;                      // [n] f32, zero before step 1
  View compute{};              // [n] bf16, or a default View: not wanted
  ConstView gradient_scale{};  // [1] f32, or a default ConstView: 1
};

/// One update. n = 0 is no work. Throws ShapeError when the vectors do not fit.
void adamw(const AdamWVectors& vectors, Argument<AdamWConstants> constants, Stream& stream);
inline void adamw(const AdamWVectors& vectors, const AdamW& hyper, int64_t step, Stream& stream) {
  adamw(vectors, adamw_constants(hyper, step), stream);
}

}  // namespace rowshard
