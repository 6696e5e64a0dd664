// Products of FP8 matrices. One function for fprop, dgrad and wgrad: both operands are copies that
// lie along the contraction.
//
//   fprop  y  = x·wᵀ    fp8_gemm(y,  x8.rowwise,     w8.rowwise)
//   dgrad  dx = dy·w    fp8_gemm(dx, dy8.rowwise,    w8.columnwise)
//   wgrad  dw = dyᵀ·x   fp8_gemm(dw, dy8.columnwise, x8.columnwise)
//
// Each block product is scaled by both scales and summed in f32. The sum plus bias is rounded to
// y's dtype; beta · y is added after that.
//
// host: operands are widened to f32 scratch and multiplied by OpenBLAS over all of K in one way for
// every M, so that with one OpenBLAS thread a row's result does not depend on the rows beside it.
//
// cuda, sm_90: 1×128·128×128 by our own kernel (fp8/gemm_1d2d.h) or by cuBLASLt, as GemmBackend
// says; 128×128·1×128 and 1×128·1×128 by cuBLASLt; without fast accumulation. It needs K % 16 = 0
// and N % 8 = 0; any M works (for cuBLASLt, what is not a multiple of 8 is padded into scratch).
//
// cuda, compute capability 10 and above: cuBLASLt's MX product (K % 32 = 0, N % 8 = 0), with both
// operands' scales put into the tensor cores' order in scratch. Compiled, and never run: there was
// no such GPU. The order of the scales and the choice of the product are tested.
//
// What the hardware has no product for (MX on sm_90, 128×128·128×128, f32 block scales elsewhere)
// is widened to bf16 and multiplied as such, which is said once in the log.
//
// Descriptors and the algorithm are cached by device, shape, layout and alignment. Queued on
// ctx.stream, capturable; scratch comes from ctx.arena (workspace).
//
// The plan device allocates and frees the scratch of a product, host or sm_90.
//
// Throws ShapeError when shapes, dtypes or devices do not fit or the pair is illegal, DeviceError
// with every size, stride, mode, alignment and version when cuBLASLt has no algorithm.
#pragma once

#include <optional>

#include "core/arena.h"
#include "fp8/fp8_view.h"

namespace rowshard {

/// Who computes 1×128·128×128 on sm_90. Both sum in one order, so the choice changes no bit, with
/// one exception that was seen: cuBLASLt splits the contraction of a narrow product with a very
/// long K (300 × 1024 with K = 28,672). Our kernel takes e4m3 codes, bf16 or f32 results, and N %
/// 16 = 0; the rest goes to cuBLASLt under every setting.
enum class GemmBackend {
  kAuto,  // whichever was measured faster for the shape (fp8/gemm_path.cpp)
  kCublasLt,
  kOwn,
};
const char* to_string(GemmBackend backend);  // "auto", "cublaslt", "own"
/// Of the process; kAuto at first. To be set before the first product is planned.
void set_gemm_backend(GemmBackend backend);
GemmBackend gemm_backend();
/// Multiprocessors that FP8 products on Hopper may take, of the process; 0, as at first: all. Fewer
/// leave some to what runs beside them. To be set before the first product.
void set_gemm_multiprocessors(int count);
int gemm_multiprocessors();
/// kOwn or kCublasLt: who computes a product of e4m3 codes into bf16 under the process' setting.
GemmBackend gemm_backend_of(int64_t m, int64_t n, int64_t k);

struct GemmOptions {
  float beta = 0;
  std::optional<ConstView> bias;  // [N]; cuda: bf16, or f16 when y is f16; host: f32, bf16 or f16
};

///   y  [M, N] f32, bf16 or f16; written, and read when beta != 0
///   x  [M, K]
///   w  [N, K]
void fp8_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
              const GemmOptions& options, Context& ctx);

/// The same on the host in the order that defines the result: per block of K (128, or 32 for MX)
/// the product of the codes, exact and then rounded to f32; acc = fma(product · x_scale, w_scale,
/// acc), or fma(product, x_scale · w_scale, acc) for 1×128·128×128, as the kernels do it; then as
/// above. Slow: for tests.
void fp8_gemm_oracle(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                     const GemmOptions& options);

}  // namespace rowshard
