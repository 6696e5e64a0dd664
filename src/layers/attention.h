// Causal grouped-query attention over packed segments.
//   o[t, h] = Σ_j softmax_j(scale · q[t, h]·k[j, g]) · v[j, g],   g = h / (Hq / Hkv),
// over the j of t's segment with j <= t. Softmax in f32 (f64 for f64). The T×T probabilities are
// never kept: the backward makes them again from lse, tile by tile (Dao et al., FlashAttention-2).
//
// T is f64, f32 or bf16 on the host; bf16 with D = 16, 32, 64 or 128 on cuda (ShapeError
// otherwise). Deterministic: every output element is summed by one owner in a fixed order.
#pragma once

#include "layers/segments.h"

namespace rowshard {

/// o [T, Hq, D], lse [Hq, T] f32 (f64 for f64; natural log of Σ_j exp(scale · q·k)),
/// q [T, Hq, D], k, v [T, Hkv, D]; Hkv divides Hq; T = segments.tokens().
void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx);

/// dq, dk, dv (overwritten, shaped like q, k, v) from do (shaped like o) and what forward read and
/// wrote. dq, dk, dv must not overlap any input.
void attention_backward(const View& dq, const View& dk, const View& dv, const ConstView& d_o,
                        const ConstView& q, const ConstView& k, const ConstView& v,
                        const ConstView& o, const ConstView& lse, const Segments& segments,
                        double scale, Context& ctx);

}  // namespace rowshard
