#include "core/matmul.h"

#include <cblas.h>

#include <algorithm>

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void matmul(const View& c, const ConstView& a, Transpose transpose_a, const ConstView& b,
            Transpose transpose_b, int64_t m, int64_t n, int64_t k, float alpha, float beta,
            Context& ctx);
}
#endif

namespace host {
namespace {

// OpenBLAS has no bf16 product that sums in f32 everywhere, so operands are widened into scratch.
struct Widened {
  Tensor scratch;
  const float* data;

  Widened(const ConstView& x, Context& ctx) {
    if (x.dtype == DType::kF32) {
      data = x.as<float>();
      return;
    }
    scratch = ctx.arena.tensor(Category::kWorkspace, "matmul.widened", DType::kF32, x.shape);
    convert(scratch, x, ctx.stream);
    data = scratch.as<float>();
  }
};

// A result narrower than f32 is summed in scratch.
Tensor wide_result(const View& c, Context& ctx) {
  return ctx.arena.tensor(Category::kWorkspace, "matmul.result", DType::kF32, c.shape);
}

}  // namespace

void matmul(const View& c, const ConstView& a, Transpose transpose_a, const ConstView& b,
            Transpose transpose_b, int64_t m, int64_t n, int64_t k, float alpha, float beta,
            Context& ctx) {
  const auto op_a = transpose_a == Transpose::kYes ? CblasTrans : CblasNoTrans;
  const auto op_b = transpose_b == Transpose::kYes ? CblasTrans : CblasNoTrans;
  const int lda = std::max<int64_t>(1, a.cols());
  const int ldb = std::max<int64_t>(1, b.cols());
  if (a.dtype == DType::kF64) {
    cblas_dgemm(CblasRowMajor, op_a, op_b, m, n, k, alpha, a.as<double>(), lda, b.as<double>(), ldb,
                beta, c.as<double>(), n);
    return;
  }
  const Widened wide_a(a, ctx);
  const Widened wide_b(b, ctx);
  if (c.dtype == DType::kF32) {
    cblas_sgemm(CblasRowMajor, op_a, op_b, m, n, k, alpha, wide_a.data, lda, wide_b.data, ldb, beta,
                c.as<float>(), n);
    return;
  }
  const Tensor wide_c = wide_result(c, ctx);
  if (beta != 0)
    convert(wide_c, c, ctx.stream);
  cblas_sgemm(CblasRowMajor, op_a, op_b, m, n, k, alpha, wide_a.data, lda, wide_b.data, ldb, beta,
              wide_c.as<float>(), n);
  convert(c, wide_c, ctx.stream);
}

}  // namespace host

namespace {

void plan_scratch(const View& c, const ConstView& a, const ConstView& b, Context& ctx) {
  if (ctx.device().index == 1) {
    ctx.arena.allocate(Category::kWorkspace, "matmul.workspace", kCudaMatmulWorkspace);
    return;
  }
  if (a.dtype == DType::kF64)
    return;
  const host::Widened wide_a(a, ctx), wide_b(b, ctx);
  if (c.dtype != DType::kF32)
    host::wide_result(c, ctx);
}

}  // namespace

void matmul(const View& c, const ConstView& a, Transpose transpose_a, const ConstView& b,
            Transpose transpose_b, float alpha, float beta, Context& ctx) {
  const bool ta = transpose_a == Transpose::kYes;
  const bool tb = transpose_b == Transpose::kYes;
  const auto rank2 = [](const auto& v) { return v.shape.rank() == 2; };
  ROWSHARD_CHECK(rank2(a) && rank2(b) && rank2(c), ShapeError, "matmul takes matrices; got A ",
                 describe(a), ", B ", describe(b), ", C ", describe(c));
  const int64_t m = a.dim(ta ? 1 : 0), k = a.dim(ta ? 0 : 1);
  const int64_t n = b.dim(tb ? 0 : 1), kb = b.dim(tb ? 1 : 0);
  const bool dtypes_fit =
      a.dtype == b.dtype &&
      (c.dtype == a.dtype || (a.dtype == DType::kBF16 && c.dtype == DType::kF32));
  ROWSHARD_CHECK(k == kb && c.dim(0) == m && c.dim(1) == n && dtypes_fit && a.device == c.device &&
                     b.device == c.device && c.device == ctx.device(),
                 ShapeError, "matmul: A ", describe(a), ta ? " transposed" : "", ", B ",
                 describe(b), tb ? " transposed" : "", ", C ", describe(c));
  if (m == 0 || n == 0)
    return;
  if (k == 0 && beta == 0) {
    fill_bytes(c, 0, ctx.stream);
    return;
  }
  if (ctx.device().is_plan())
    return plan_scratch(c, a, b, ctx);
  ROWSHARD_DISPATCH(ctx.device(),
                    matmul(c, a, transpose_a, b, transpose_b, m, n, k, alpha, beta, ctx));
}

}  // namespace rowshard
