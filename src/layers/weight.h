// A weight as one step sees it. It owns nothing: values, gradients and FP8 copies belong to a unit,
// an optimiser, or whoever else made them.
#pragma once

#include <optional>
#include <string>

#include "fp8/fp8_matrix.h"

namespace rowshard {

/// FP8 copies of a weight whose values are kept in bf16 or f32 (its master). They are quantised in
/// forward when the master has changed, and reused by later micro-batches.
struct Fp8Workspace {
  Fp8Matrix matrix;  // [N, K]
  /// LinearWeight::version when they were made; none: never.
  std::optional<uint64_t> version = {};
  /// One f32 on the device, 1: the master has not changed since. A graph reads it at every replay
  /// in place of comparing versions, so without it a forward that would quantise cannot be
  /// captured.
  const float* unchanged = nullptr;
};

struct LinearWeight {
  std::string name;                   // for messages, "model.layers.3.mlp.down_proj"
  int64_t n = 0;                      // outputs
  int64_t k = 0;                      // inputs
  Fp8Matrix* fp8 = nullptr;           // [N, K], or null: then `plain` is the weight
  ConstView plain = {};               // [N, K] f64, f32 or bf16; with a workspace, its master
  ConstView bias = {};                // [N] in the dtype of y, or no data
  Fp8Workspace* workspace = nullptr;  // FP8 copies of `plain`, in place of `fp8`
  uint64_t version = 0;               // of the values in `plain`: raised by who writes them

  // What this step trains; no data: frozen. Either may change between steps.
  View gradient = {};               // [N, K] f32 (f64 for f64), or bf16
  bool accumulate_gradient = true;  // gradient += (false: the first micro-batch overwrites)
  View bias_gradient = {};          // [N] f32 (f64 for f64), always +=

  /// The FP8 matrix that products read, or null.
  Fp8Matrix* quantized() const { return workspace ? &workspace->matrix : fp8; }
  bool trainable() const { return gradient.data != nullptr; }
};

/// Before fprop: brings the workspace, if there is one, up to date with the master. `copies` are
/// made together by one kernel; copies that are there besides stay up to date too. While a graph is
/// recorded, a quantisation is recorded with the flag `unchanged`; UsageError when there is none,
/// or when a copy is missing: a replay would read what no step has made.
void refresh_workspace(const LinearWeight& weight, Usage copies, Context& ctx);

/// ShapeError unless the weight holds what it declares.
void check_weight(const char* operation, const LinearWeight& weight);

}  // namespace rowshard
