// The one way from an FP8 product to cuBLASLt, for the cuda sources of this room.
//
// Descriptors and the algorithm are made once for a device, shape, layout, dtype, grouping and
// alignment, and live as long as the process. A warm call is one look-up, the attributes that
// changed and cublasLtMatmul; the host's share is measured by `rowshard bench gemm` beside the bare
// call. One lock is held over the call, because operand pointers are attributes of the shared
// descriptor. Queued on ctx.stream; the workspace comes from ctx.arena.
//
// Throws DeviceError with every size, stride, mode, alignment and version when cuBLASLt has no
// algorithm, or is too old to have one.
#pragma once

#include <vector>

#include "fp8/gemm.h"

namespace rowshard::cuda {

/// At most 256.
int alignment_of(const void* pointer);

/// y = x·wᵀ, both scaled. Pairs: those of the block-scaled product, or MX with scales swizzled
/// (fp8/mx_scales.h). K % 16 = 0 and N % 8 = 0; M % 8 = 0 for block scales.
void cublaslt_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                   const GemmOptions& options, Context& ctx);

/// For the bench: microseconds of each of cuBLASLt's candidates, the one cublaslt_gemm uses first.
std::vector<double> time_gemm_algorithms(const View& y, const ConstFp8View& x,
                                         const ConstFp8View& w, int repeats, Context& ctx);
/// For the bench: the host's microseconds for one cublasLtMatmul with everything at hand, the
/// smallest that any caller can reach.
double time_bare_call(const View& y, const ConstFp8View& x, const ConstFp8View& w, int calls,
                      Context& ctx);

}  // namespace rowshard::cuda
