// Low-rank adapter on a frozen linear layer:  y += s · B · A · dropout(x).
//   xa = dropout(x) · Aᵀ,  y += s · xa · Bᵀ
//   dB += s · dyᵀ · xa,  dxa = s · dy · B,  dA += dxaᵀ · dropout(x),  dx += dropout'(dxa · A)
// s = alpha / r (or alpha / √r, the caller's choice). Built on core/matmul.h; scratch is arena
// workspace, released on return.
#pragma once

#include "core/arena.h"
#include "core/argument.h"
#include "core/rng.h"

namespace rowshard {

/// One adapter. Does not own its memory: the factors in the compute dtype and their gradients are
/// slices of flat buckets of the optimiser.
struct LoraFactors {
  ConstView a;      // [r, K] T
  ConstView b;      // [N, r] T
  View grad_a;      // [r, K] f32 (f64 for f64); accumulated into; unused in forward
  View grad_b;      // [N, r] f32 (f64 for f64); accumulated into; unused in forward
  float scale = 1;  // s

  int64_t rank() const { return a.dim(0); }
};

/// The mask is a pure function of (random, element), so backward makes it again and nothing is
/// kept. Element k of token t is dropped when
///   random.uniform((first_token + t) · columns + first_column + k) < rate;
/// the others are divided by (1 − rate). So a rank that holds some tokens, or some features of
/// them, draws its part of the whole's mask.
struct Dropout {
  float rate = 0;                         // [0, 1); 0 skips
  Philox random;                          // one stream per (step, adapter)
  int64_t first_token = 0;                // global index of this rank's row 0
  int64_t first_column = 0;               // feature of the whole that column 0 of x is
  int64_t columns = 0;                    // features of the whole; 0: those of x
  Argument<uint64_t> base = uint64_t{0};  // added to random.stream; a graph's replays differ by it

  ROWSHARD_HD Philox philox() const { return {random.seed, random.stream + base.get()}; }
};

/// What forward leaves for backward, besides x.
struct LoraSaved {
  Tensor xa;  // [T, r] T
  Dropout dropout;
};

/// y [T, N] += s · dropout(x) · Aᵀ · Bᵀ.  x [T, K]. saved may be null when no backward follows.
void lora_forward(const View& y, const ConstView& x, const LoraFactors& factors,
                  const Dropout& dropout, LoraSaved* saved, Context& ctx);

/// dy [T, N], x [T, K] as in forward; dx [T, K] += (skipped when dx has no data).
void lora_backward(const View& dx, const ConstView& dy, const ConstView& x,
                   const LoraFactors& factors, const LoraSaved& saved, Context& ctx);

// The products of the two above, for callers that move something between them. They check shapes as
// matmul does, and nothing more.

/// xa [T, r] = dropout(x) · Aᵀ
void lora_down(const View& xa, const ConstView& x, const LoraFactors& factors,
               const Dropout& dropout, Context& ctx);
/// y += s · xa · Bᵀ
void lora_up(const View& y, const ConstView& xa, const LoraFactors& factors, Context& ctx);
/// dB += s · dyᵀ · xa
void lora_up_gradient(const ConstView& dy, const ConstView& xa, const LoraFactors& factors,
                      Context& ctx);
/// dxa [T, r] = s · dy · B
void lora_up_backward(const View& dxa, const ConstView& dy, const LoraFactors& factors,
                      Context& ctx);
/// dA += dxaᵀ · dropout(x),  dx += dropout'(dxa · A) unless dx has no data
void lora_down_backward(const View& dx, const ConstView& dxa, const ConstView& x,
                        const LoraFactors& factors, const Dropout& dropout, Context& ctx);

/// y = x with the mask applied (also the backward of itself); y may be x. x [T, K].
void apply_dropout(const View& y, const ConstView& x, const Dropout& dropout, Stream& stream);

}  // namespace rowshard
