// Plain matrix products on both devices: cuBLASLt on cuda, OpenBLAS on the host.
//
// All matrices are row-major and contiguous. dtypes: f64 (host only), f32, bf16; A and B share one,
// C may be wider (bf16 operands with an f32 result). Sums are f32 (f64 for f64).
//
// The plan device allocates and frees the scratch that the device it stands for would take: index 0
// is the host, 1 is cuda.
#pragma once

#include "core/arena.h"

namespace rowshard {

/// Scratch of every product on cuda: cuBLAS' advice for Hopper.
inline constexpr int64_t kCudaMatmulWorkspace = int64_t{32} << 20;

enum class Transpose { kNo, kYes };

/// C = alpha · op(A) · op(B) + beta · C on ctx.stream.
///   A  [M, K], or [K, M] with transpose_a
///   B  [K, N], or [N, K] with transpose_b
///   C  [M, N]
/// Any of M, N, K may be 0 (K = 0 gives beta · C). beta = 0 never reads C. Throws ShapeError with
/// all shapes when they do not fit.
void matmul(const View& c, const ConstView& a, Transpose transpose_a, const ConstView& b,
            Transpose transpose_b, float alpha, float beta, Context& ctx);

}  // namespace rowshard
