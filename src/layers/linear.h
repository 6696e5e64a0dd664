// The linear layer  y = x · Wᵀ + bias + s · B · A · dropout(x),  with a frozen W held in FP8 or
// plain, and an optional trainable adapter.
//
// With an FP8 weight both base GEMMs run in FP8: fprop reads the rowwise copy and x quantised
// 1×128, dgrad reads the columnwise copy and dy quantised 1×128. W is frozen, so there is no wgrad:
// no columnwise x or dy is ever made, and x is kept only for the adapter.
//
// Everything is queued on ctx.stream; scratch is arena workspace, released on return. ShapeError
// and UsageError name the weight.
#pragma once

#include <initializer_list>
#include <string>

#include "fp8/fp8_matrix.h"
#include "layers/lora.h"

namespace rowshard {

/// A frozen weight as this step sees it. Owns nothing: the bytes belong to the unit it was gathered
/// with.
struct LinearWeight {
  std::string name;          // for messages, "model.layers.3.mlp.down_proj"
  int64_t n = 0;             // outputs
  int64_t k = 0;             // inputs
  Fp8Matrix* fp8 = nullptr;  // [N, K], or null: then `plain` is the weight
  ConstView plain;           // [N, K] f64, f32 or bf16
  ConstView bias;            // [N] in the dtype of y, or no data
};

/// When the columnwise copy of a frozen FP8 weight exists.
enum class ColumnwisePolicy {
  kRelease,   // made just before dgrad, released right after it
  kResident,  // made once, kept
  kDirect,    // never made: a dgrad that reads the rowwise bytes
};
const char* to_string(ColumnwisePolicy policy);  // "release", "resident", "direct"

/// x quantised along K, made once and read by every projection of x (q, k, v; gate, up): 1×128, or
/// MX 1×32 for MX weights. Holds no data when no reader is FP8.
struct QuantizedInput {
  Tensor codes;   // [T, K] e4m3
  Tensor scales;  // gemm_scale_shape(grouping, T, K)
  Grouping grouping = Grouping::k1x128;

  explicit operator bool() const { return static_cast<bool>(codes); }
  ConstFp8View view() const { return {codes, scales, grouping}; }
};
/// Throws ConfigError when the readers mix 128-blocks and MX.
QuantizedInput quantize_input(const ConstView& x,
                              std::initializer_list<const LinearWeight*> readers, Context& ctx);

/// What backward needs. `x` is a view of the caller's x, which must outlive the backward; it has no
/// data when the layer has no adapter.
struct LinearSaved {
  ConstView x;  // [T, K]
  LoraSaved lora;
};

/// y [T, N] = x [T, K] · Wᵀ (+ bias) (+ adapter). x and y share a dtype: f64 (host, plain f64
/// weights only), f32 or bf16. A plain weight of another float dtype than x is converted into
/// scratch. x8 must hold x when the weight is FP8 and may be empty otherwise. lora may be null;
/// saved may be null when no backward follows.
void linear_forward(const View& y, const ConstView& x, const QuantizedInput& x8,
                    const LinearWeight& weight, const LoraFactors* lora, const Dropout& dropout,
                    LinearSaved* saved, Context& ctx);

/// dx [T, K] = dy · W + adapter (or dx += with accumulate_dx), and the adapter's gradients +=
/// theirs. A dx without data asks for the adapter's gradients only: no dgrad runs, and no
/// columnwise copy is made. `policy` rules an FP8 weight's columnwise copy; kDirect throws
/// ConfigError (not in this build yet). kRelease leaves a copy that was there before the call alone
/// only if the matrix cannot rebuild it.
void linear_backward(const View& dx, const ConstView& dy, const LinearSaved& saved,
                     const LinearWeight& weight, const LoraFactors* lora, bool accumulate_dx,
                     ColumnwisePolicy policy, Context& ctx);

}  // namespace rowshard
