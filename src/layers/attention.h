// Causal grouped-query attention over packed segments.
//   o[t, h] = Σ_j softmax_j(scale · q[t, h]·k[j, g]) · v[j, g],   g = h / (Hq / Hkv),
// over the j of t's segment with j <= t. Softmax in f32 (f64 for f64). The T×T probabilities are
// never kept: the backward makes them again from lse, tile by tile (Dao et al., FlashAttention-2).
//
// The element type is f64, f32 or bf16 on the host; bf16 with D = 16, 32, 64 or 128 on cuda
// (ShapeError otherwise). Deterministic: two runs over the same segments give the same bits.
//
// cuda: D = 64 and 128 run through cuDNN's fused attention with its deterministic backward, other
// sizes through our own kernels, and so does everything where cuDNN is missing or refuses (said
// once in the log with the reason). Scratch is of a size that follows from the shapes alone.
// cuDNN's plans are made at the first call of a rounded shape, which must not be inside a capture;
// a graph serves segments of one attention_layout.
//
// The plan device allocates and frees the scratch of a call, host or cuda.
#pragma once

#include "layers/segments.h"

namespace rowshard {

/// o [T, Hq, D], lse [T, Hq] f32 (f64 for f64; natural log of Σ_j exp(scale · q·k)),
/// q [T, Hq, D], k, v [T, Hkv, D]; Hkv divides Hq; T = segments.tokens().
void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx);

/// dq, dk, dv (overwritten, shaped like q, k, v) from do (shaped like o) and what forward read and
/// wrote. dq, dk, dv must not overlap any input.
void attention_backward(const View& dq, const View& dk, const View& dv, const ConstView& d_o,
                        const ConstView& q, const ConstView& k, const ConstView& v,
                        const ConstView& o, const ConstView& lse, const Segments& segments,
                        double scale, Context& ctx);

/// What a recorded attention depends on besides shapes: a graph of segments with these bounds
/// serves others of as many tokens that have the same layout (Segments::assign). Empty where it
/// serves all.
std::vector<int64_t> attention_layout(const std::vector<int32_t>& bounds, int64_t heads,
                                      int64_t kv_heads, int64_t head_dim);

}  // namespace rowshard
