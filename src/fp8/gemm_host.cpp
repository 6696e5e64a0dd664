#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/error.h"
#include "core/matmul.h"
#include "fp8/gemm.h"
#include "fp8/gemm_path.h"
#include "fp8/gemm_scratch.h"
#include "fp8/quantize.h"
#include "fp8/scale_grid.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void fp8_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
              const GemmOptions& options, Context& ctx);
}
#endif

namespace {

float bias_at(const ConstView& bias, int64_t i) {
  switch (bias.dtype) {
    case DType::kF32:
      return bias.as<float>()[i];
    case DType::kBF16:
      return static_cast<float>(bias.as<bf16>()[i]);
    default:
      return static_cast<float>(bias.as<f16>()[i]);
  }
}

/// The product is rounded to y's dtype before beta · y is added, as a reduced-precision accumulator
/// does it.
template <typename T>
void store_row(T* y, const float* sums, int64_t count, const GemmOptions& options) {
  for (int64_t n = 0; n < count; ++n) {
    const float sum = options.bias ? sums[n] + bias_at(*options.bias, n) : sums[n];
    const T product = static_cast<T>(sum);
    y[n] =
        options.beta == 0
            ? product
            : static_cast<T>(static_cast<float>(product) + options.beta * static_cast<float>(y[n]));
  }
}

void store_row(const View& y, int64_t row, const float* sums, const GemmOptions& options) {
  const int64_t count = y.dim(1);
  switch (y.dtype) {
    case DType::kF32:
      return store_row(y.as<float>() + row * count, sums, count, options);
    case DType::kBF16:
      return store_row(y.as<bf16>() + row * count, sums, count, options);
    default:
      return store_row(y.as<f16>() + row * count, sums, count, options);
  }
}

void check_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                const GemmOptions& options) {
  check(x, "fp8_gemm: x");
  check(w, "fp8_gemm: w");
  // Only on failure: building a message costs more than a whole warm call.
  const auto all = [&] {
    return message("fp8_gemm: y ", describe(y), ", x ", describe(x), ", w ", describe(w));
  };
  ROWSHARD_CHECK(y.shape.rank() == 2 && y.dim(0) == x.outer() && y.dim(1) == w.outer() &&
                     x.inner() == w.inner(),
                 ShapeError, all(), "; wanted y [M, N], x [M, K], w [N, K]");
  ROWSHARD_CHECK(y.dtype == DType::kF32 || y.dtype == DType::kBF16 || y.dtype == DType::kF16,
                 ShapeError, all(), "; the result is f32, bf16 or f16");
  ROWSHARD_CHECK(y.device == x.codes.device && y.device == w.codes.device, ShapeError, all(),
                 "; one device for all");
  ROWSHARD_CHECK(x.codes.dtype == DType::kE4M3 || w.codes.dtype == DType::kE4M3, ShapeError, all(),
                 "; there is no product of e5m2 by e5m2: one operand must be e4m3");
  ROWSHARD_CHECK(is_mx(x.grouping) == is_mx(w.grouping), ShapeError, all(),
                 "; groups of 32 and of 128 do not meet in one product");
  if (options.bias) {
    const ConstView& bias = *options.bias;
    ROWSHARD_CHECK(
        bias.shape == Shape{w.outer()} && bias.device == y.device &&
            (bias.dtype == DType::kF32 || bias.dtype == DType::kBF16 || bias.dtype == DType::kF16),
        ShapeError, all(), "; bias ", describe(bias), " must be [N] f32, bf16 or f16");
  }
}

}  // namespace

namespace host {
namespace {

/// result [m, n] = wide_x [m, k] · wide_w [n, k]ᵀ + beta · result
void product(float* result, const float* wide_x, const float* wide_w, int64_t m, int64_t n,
             int64_t k, float beta) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0f, wide_x, k, wide_w, k, beta,
              result, n);
}

void fp8_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
              const GemmOptions& options, Context& ctx) {
  const int64_t m = x.outer(), n = w.outer(), k = x.inner();
  const int64_t tail = m % kRowStep, body = m - tail;
  const GemmScratch scratch(y, x, w, options, ctx);
  const Tensor &wide_x = scratch.x, &wide_w = scratch.w, &last = scratch.tail;
  dequantize(wide_x.view().slice_rows(0, m), x, ctx.stream);
  std::fill_n(wide_x.as<float>() + m * k, wide_x.view().elements() - m * k, 0.0f);
  dequantize(wide_w, w, ctx.stream);

  const bool direct = !scratch.sums;
  const float beta = direct ? options.beta : 0.0f;
  float* result = direct ? y.as<float>() : scratch.sums.as<float>();
  if (body > 0) {
    product(result, wide_x.as<float>(), wide_w.as<float>(), body, n, k, beta);
  }
  if (tail > 0) {
    float* end = result + body * n;
    std::fill_n(last.as<float>(), kRowStep * n, 0.0f);
    if (beta != 0) {
      std::copy_n(end, tail * n, last.as<float>());
    }
    product(last.as<float>(), wide_x.as<float>() + body * k, wide_w.as<float>(), kRowStep, n, k,
            beta);
    std::copy_n(last.as<float>(), tail * n, end);
  }
  if (!direct) {
#pragma omp parallel for if (m * n > 65536)
    for (int64_t row = 0; row < m; ++row) {
      store_row(y, row, result + row * n, options);
    }
  }
}

}  // namespace
}  // namespace host

namespace {

/// Of the host, or of Hopper.
void plan_scratch(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                  const GemmOptions& options, Context& ctx) {
  if (ctx.device().index == 0) {
    host::GemmScratch(y, x, w, options, ctx);
    return;
  }
  if (choose_gemm(90, x.grouping, w.grouping, w.outer(), x.inner()).path == GemmPath::kWidened) {
    const cuda::WidenedGemmScratch scratch(x, w, ctx);
    matmul(scratch.sums, scratch.x, Transpose::kNo, scratch.w, Transpose::kYes, 1, 0, ctx);
    return;
  }
  if (own_gemm_chosen(gemm_backend(), y.dtype, x, w)) {
    return;
  }
  std::optional<cuda::PaddedGemmScratch> padded;
  if (x.outer() % 8 != 0)
    padded.emplace(y, x, ctx);
  cuda::gemm_workspace(ctx);
}

}  // namespace

void fp8_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
              const GemmOptions& options, Context& ctx) {
  check_gemm(y, x, w, options);
  ROWSHARD_CHECK(ctx.device() == y.device, ShapeError, "fp8_gemm: operands on ", y.device,
                 ", stream on ", ctx.device());
  ROWSHARD_CHECK(x.inner() > 0, ShapeError, "fp8_gemm: nothing to contract over: x ", describe(x));
  if (y.elements() == 0) {
    return;
  }
  if (ctx.device().is_plan()) {
    return plan_scratch(y, x, w, options, ctx);
  }
  ROWSHARD_DISPATCH(ctx.device(), fp8_gemm(y, x, w, options, ctx));
}

void fp8_gemm_oracle(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                     const GemmOptions& options) {
  check_gemm(y, x, w, options);
  require_host(y.device);
  const int64_t m = x.outer(), n = w.outer(), k = x.inner(), block = inner_block(x.grouping);
  const float* x_values = decode_table(format_of(x.codes.dtype));
  const float* w_values = decode_table(format_of(w.codes.dtype));
  const auto* x_codes = static_cast<const uint8_t*>(x.codes.data);
  const auto* w_codes = static_cast<const uint8_t*>(w.codes.data);
  const ScaleGrid x_scales(x), w_scales(w);
  // Order of the two multiplications: see the header.
  const bool scales_first = w.grouping == Grouping::k128x128 && x.grouping == Grouping::k1x128;
#pragma omp parallel for if (m * n * k > 65536)
  for (int64_t row = 0; row < m; ++row) {
    std::unique_ptr<float[]> sums(new float[n]);
    for (int64_t col = 0; col < n; ++col) {
      float sum = 0;
      for (int64_t begin = 0; begin < k; begin += block) {
        const int64_t end = std::min(begin + block, k);
        // A product of two codes has 8 significant bits, so a block's sum is exact in double.
        double product = 0;
        for (int64_t i = begin; i < end; ++i) {
          product +=
              static_cast<double>(x_values[x_codes[row * k + i]]) * w_values[w_codes[col * k + i]];
        }
        const float x_scale = x_scales.at(row, begin / block);
        const float w_scale = w_scales.at(col, begin / block);
        const float p = static_cast<float>(product);
        sum = scales_first ? std::fma(p, x_scale * w_scale, sum)
                           : std::fma(p * x_scale, w_scale, sum);
      }
      sums[col] = sum;
    }
    store_row(y, row, sums.get(), options);
  }
}

}  // namespace rowshard
