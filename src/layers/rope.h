// Rotary position embedding with rotate-half pairing: element i of a head turns with i + D/2.
//   y[i]       = x[i] · cos − x[i + D/2] · sin
//   y[i + D/2] = x[i + D/2] · cos + x[i] · sin,      angle = position · theta^(−2i/D)
// Angles, cosines and sines are f32 or better and the rotation is rounded once, to T; Hugging Face
// rounds cos and sin to T first, so bf16 results differ from its by the last bit.
#pragma once

#include <optional>

#include "core/arena.h"

namespace rowshard {

/// The frequency scaling of Llama 3.1 and later (`rope_type: llama3`).
struct Llama3RopeScaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position = 8192;
};

/// Cosines and sines of every position, made once on the host and copied to the device.
struct RopeTable {
  Tensor cos;  // [max_position, D/2] f32
  Tensor sin;  // [max_position, D/2] f32

  /// Throws ConfigError unless head_dim is even and positive and theta > 0.
  RopeTable(int64_t head_dim, int64_t max_position, double theta,
            const std::optional<Llama3RopeScaling>& scaling, Context& ctx);

  int64_t max_position() const { return cos.shape()[0]; }
  int64_t head_dim() const { return 2 * cos.shape()[1]; }
};

enum class RopeDirection { kForward, kBackward };

/// Turns x [T, heads, D] (f64 host only, f32, bf16) in place; kBackward turns by the negative
/// angle, which is the gradient. positions [T] i32, each below table.max_position(): the host
/// throws ShapeError on one that is not; for cuda the caller compares segments.longest() with it.
void rope(const View& x, const ConstView& positions, const RopeTable& table,
          RopeDirection direction, Stream& stream);

}  // namespace rowshard
