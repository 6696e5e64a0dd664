// The two ways attention runs on a GPU, for the sources of this room only.
#pragma once

#include "layers/attention_scratch.h"

namespace rowshard::cuda {

/// Operands of forward and backward; what a pass does not use is empty.
struct AttentionOperands {
  View o, lse;      // [T, Hq, D], [T, Hq] f32; read by backward
  View dq, dk, dv;  // backward
  ConstView q, k, v;
  ConstView d_o;  // backward
  double scale;
  bool backward() const { return dq.data != nullptr; }
};

/// cuDNN's fused attention. False, and said once in the log with the reason, when it cannot do
/// this: then nothing was queued.
bool cudnn_attention(const AttentionOperands& operands, const Segments& segments,
                     const AttentionScratch& scratch, Context& ctx);

/// Fills the table of `entries` segments in descending length, as cuDNN wants them.
///   by_length  [T, 2] i32 start, length; (T, 0) after the last segment
void attention_table(const View& table, const ConstView& by_length, int64_t entries, int64_t heads,
                     int64_t kv_heads, int64_t head_dim, Stream& stream);

/// Our own kernels: any head size of 16, 32, 64 and 128.
///   delta  [T, Hq] f32, backward only
void own_attention(const AttentionOperands& operands, const Segments& segments, float* delta,
                   Context& ctx);

}  // namespace rowshard::cuda
