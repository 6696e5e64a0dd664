// The dgrad product without a columnwise copy: dx = dy · w from the rowwise codes of w.
//
// Results are those of fp8_gemm(dx, dy, columnwise copy of w), bit for bit. On sm_90
// gemm_1d2d.cuh reads the rowwise codes and has no scratch; it takes e4m3 codes, dx bf16 or f32, N
// and K in multiples of 16, and 16-byte aligned operands. Everywhere else, the host included, the
// columnwise copy is made in workspace and dropped; on cuda that is said once in the log.
//
// Queued on ctx.stream, safe to capture. Throws ShapeError when shapes, dtypes, devices or
// alignment do not fit.
#pragma once

#include "core/arena.h"
#include "fp8/fp8_view.h"

namespace rowshard {

///   dx [M, K] f32 or bf16; written, and read when beta != 0: dx = dy · w + beta · dx, the product
///             rounded to dx's dtype first
///   dy [M, N] 1×128
///   w  [N, K] 128×128, the rowwise copy
void fp8_dgrad_rowwise(const View& dx, const ConstFp8View& dy, const ConstFp8View& w, float beta,
                       Context& ctx);

/// Whether cuda has the direct product for these: what a caller asks before it plans to do without
/// a columnwise copy. `capability`: compute capability × 10.
bool dgrad_rowwise_runs(int capability, DType dx, const ConstFp8View& dy, const ConstFp8View& w);

}  // namespace rowshard
