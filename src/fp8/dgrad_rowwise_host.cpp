#include "core/error.h"
#include "core/log.h"
#include "fp8/dgrad_rowwise.h"
#include "fp8/gemm.h"
#include "fp8/rebuild.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void fp8_dgrad_rowwise(const View& dx, const ConstFp8View& dy, const ConstFp8View& w, float beta,
                       Context& ctx);
}
#endif

namespace {

void check_dgrad(const View& dx, const ConstFp8View& dy, const ConstFp8View& w) {
  check(dy, "fp8_dgrad_rowwise: dy");
  check(w, "fp8_dgrad_rowwise: w");
  ROWSHARD_CHECK(dx.shape.rank() == 2 && dx.dim(0) == dy.outer() && dx.dim(1) == w.inner() &&
                     dy.inner() == w.outer() && dy.grouping == Grouping::k1x128 &&
                     w.grouping == Grouping::k128x128,
                 ShapeError, "fp8_dgrad_rowwise: dx ", describe(dx), ", dy ", describe(dy), ", w ",
                 describe(w), "; wanted dx [M, K], dy [M, N] 1x128, w [N, K] 128x128");
  ROWSHARD_CHECK(dx.device == dy.codes.device && dx.device == w.codes.device, ShapeError,
                 "fp8_dgrad_rowwise: dx ", describe(dx), ", dy ", describe(dy), ", w ", describe(w),
                 "; one device for all");
}

/// On the host, and where cuda has no direct product: a columnwise copy in scratch.
void rebuild_and_multiply(const View& dx, const ConstFp8View& dy, const ConstFp8View& w, float beta,
                          Context& ctx) {
  const int64_t n = w.outer(), k = w.inner();
  const Tensor codes =
      ctx.arena.tensor(Category::kWorkspace, "dgrad.columnwise", w.codes.dtype, {k, n});
  const Tensor scales = ctx.arena.tensor(Category::kWorkspace, "dgrad.scales", DType::kF32,
                                         gemm_scale_shape(w.grouping, k, n));
  const Fp8View columnwise{codes, scales, w.grouping};
  rebuild_columnwise(columnwise, w, ctx.stream);
  fp8_gemm(dx, dy, columnwise, {.beta = beta, .bias = std::nullopt}, ctx);
}

}  // namespace

bool dgrad_rowwise_runs(int capability, DType dx, const ConstFp8View& dy, const ConstFp8View& w) {
  return capability == 90 && dy.grouping == Grouping::k1x128 && w.grouping == Grouping::k128x128 &&
         dy.codes.dtype == DType::kE4M3 && w.codes.dtype == DType::kE4M3 &&
         (dx == DType::kBF16 || dx == DType::kF32) && w.outer() % 16 == 0 && w.inner() % 16 == 0;
}

void fp8_dgrad_rowwise(const View& dx, const ConstFp8View& dy, const ConstFp8View& w, float beta,
                       Context& ctx) {
  check_dgrad(dx, dy, w);
  ROWSHARD_CHECK(ctx.device() == dx.device, ShapeError, "fp8_dgrad_rowwise: operands on ",
                 dx.device, ", stream on ", ctx.device());
  if (dx.elements() == 0)
    return;
  // The plan device with an index stands for a Hopper GPU, as in fp8_gemm.
  const Device device = ctx.device();
  const bool on_cuda = device.is_cuda() || (device.is_plan() && device.index > 0);
  const int capability = !on_cuda ? 0 : device.is_plan() ? 90 : compute_capability(device);
  if (!dgrad_rowwise_runs(capability, dx.dtype, dy, w)) {
    if (on_cuda) {
      log_once(message("dgrad_rowwise ", to_string(dx.dtype), to_string(w.codes.dtype)),
               message("dgrad from the rowwise copy: no such kernel for dx ", describe(dx), ", dy ",
                       describe(dy), ", w ", describe(w), " at compute capability ", capability,
                       "; a columnwise copy is made in scratch for each product"));
    }
    return rebuild_and_multiply(dx, dy, w, beta, ctx);
  }
  if (device.is_plan())
    return;  // no scratch
#if ROWSHARD_CUDA
  cuda::fp8_dgrad_rowwise(dx, dy, w, beta, ctx);
#else
  require_host(device);
#endif
}

}  // namespace rowshard
