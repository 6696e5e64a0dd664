// RMSNorm and LayerNorm over the last dimension, alone or together with the 1×128 quantiser of what
// reads the result.
//
//   RMSNorm    rstd = 1 / sqrt(mean(x²) + eps),           y = T(x · rstd) · weight
//              (Hugging Face's order: x · rstd is rounded to T before the weight multiplies it)
//   LayerNorm  rstd = 1 / sqrt(mean((x − mean)²) + eps),  y = (x − mean) · rstd · weight + bias
//              (torch's order: one rounding at the end)
//
// x may be any tensor whose last dimension is H (T tokens, or T·heads rows of a per-head norm); all
// other dimensions are rows. T is f64 (host only), f32 or bf16; sums are f32 (f64 for f64). Queued
// on the stream. ShapeError names the operands that do not fit.
#pragma once

#include "core/arena.h"
#include "fp8/fp8_view.h"

namespace rowshard {

enum class NormKind { kRms, kLayer };
const char* to_string(NormKind kind);  // "rms_norm", "layer_norm"

/// Owns nothing.
struct Norm {
  NormKind kind = NormKind::kRms;
  ConstView weight = {};  // [H] T
  ConstView bias = {};    // [H] T or no data; LayerNorm only
  double eps = 1e-6;
};

/// What forward leaves for backward, f32 (f64 for f64): rstd [rows] of RMSNorm; the means and then
/// the rstd, [2, rows], of LayerNorm.
Shape norm_statistics_shape(NormKind kind, int64_t rows);

/// y [rows, H] T (may be x), or no data when only the codes are wanted. y8, 1×128 e4m3 of y, or
/// null: the bytes that quantize() makes of y. statistics: as above.
void norm_forward(const View& y, const Fp8View* y8, const View& statistics, const ConstView& x,
                  const Norm& norm, Stream& stream);

/// Of the norm's own parameters, [H] f32 (f64 for f64), added to in a fixed order; or no data.
struct NormGradients {
  View weight = {};
  View bias = {};

  bool wanted() const { return weight.data != nullptr || bias.data != nullptr; }
};

/// With g = dy · weight and n the normalised x:
///   RMSNorm    dx = rstd · (g − n · mean(g · n))
///   LayerNorm  dx = rstd · (g − mean(g) − n · mean(g · n))
/// or dx += that when `accumulate` (the residual path has already put its gradient there). The
/// rounding of x · rstd counts as the identity. dx may be dy when not accumulating, and has no data
/// when only the gradients are wanted: dweight += Σ dy · n, dbias += Σ dy. Scratch is workspace.
void norm_backward(const View& dx, const ConstView& dy, const ConstView& x, const Norm& norm,
                   const ConstView& statistics, bool accumulate, const NormGradients& gradients,
                   Context& ctx);

}  // namespace rowshard
