// Which product runs is decided by fp8/gemm_path.h; here are the padding and the scratch around it.
#include <algorithm>
#include <atomic>

#include "core/cuda_check.h"
#include "core/log.h"
#include "core/matmul.h"
#include "fp8/gemm.h"
#include "fp8/gemm_1d2d.h"
#include "fp8/gemm_cublaslt.h"
#include "fp8/gemm_path.h"
#include "fp8/gemm_scratch.h"
#include "fp8/mx_scales.h"
#include "fp8/quantize.h"

namespace rowshard::cuda {
namespace {

constexpr int kThreads = 256;

/// M rounded up to 8 in scratch: rows of zero codes; their results are not copied out.
void cublaslt_gemm_padded(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                          const GemmOptions& options, Context& ctx) {
  const int64_t m = x.outer(), padded = round_up(m, 8);
  const PaddedGemmScratch scratch(y, x, ctx);
  const View codes_view = scratch.codes, result_view = scratch.result;
  copy(codes_view.slice_rows(0, m), x.codes, ctx.stream);
  fill_bytes(codes_view.slice_rows(m, padded - m), 0, ctx.stream);
  ConstFp8View padded_x(codes_view, x.scales, x.grouping);
  if (scratch.scales) {
    // One more group of four rows. Its scales meet zero codes only; zero keeps them finite.
    const View scales = scratch.scales;
    fill_bytes(scales, 0, ctx.stream);
    CUDA_CHECK(cudaMemcpy2DAsync(scales.data, scales.dim(1) * sizeof(float), x.scales.data,
                                 x.scales.dim(1) * sizeof(float), x.scales.dim(1) * sizeof(float),
                                 scales.dim(0), cudaMemcpyDeviceToDevice, native(ctx.stream)));
    padded_x.scales = scales;
  }
  if (options.beta != 0) {
    copy(result_view.slice_rows(0, m), y, ctx.stream);
    fill_bytes(result_view.slice_rows(m, padded - m), 0, ctx.stream);
  }
  cublaslt_gemm(result_view, padded_x, w, options, ctx);
  copy(y, result_view.slice_rows(0, m), ctx.stream);
}

template <typename T>
__global__ void store_kernel(T* y, const float* sums, const void* bias, DType bias_dtype,
                             int64_t count, int64_t n, float beta) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += stride) {
    float sum = sums[i];
    if (bias) {
      sum += bias_dtype == DType::kF32 ? static_cast<const float*>(bias)[i % n]
             : bias_dtype == DType::kBF16
                 ? static_cast<float>(static_cast<const bf16*>(bias)[i % n])
                 : static_cast<float>(static_cast<const f16*>(bias)[i % n]);
    }
    const T product = static_cast<T>(sum);
    y[i] = beta == 0
               ? product
               : static_cast<T>(static_cast<float>(product) + beta * static_cast<float>(y[i]));
  }
}

/// Where there is no FP8 product: both operands as bf16, exact for power-of-two scales.
void widened(const View& y, const ConstFp8View& x, const ConstFp8View& w,
             const GemmOptions& options, Context& ctx) {
  const int64_t m = x.outer(), n = w.outer();
  const WidenedGemmScratch scratch(x, w, ctx);
  const Tensor &wide_x = scratch.x, &wide_w = scratch.w, &sums = scratch.sums;
  dequantize(wide_x, x, ctx.stream);
  dequantize(wide_w, w, ctx.stream);
  matmul(sums, wide_x, Transpose::kNo, wide_w, Transpose::kYes, 1.0f, 0.0f, ctx);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(m * n, kThreads), 132 * 16));
  const void* bias = options.bias ? options.bias->data : nullptr;
  const DType bias_dtype = options.bias ? options.bias->dtype : DType::kF32;
  const auto launch = [&](auto* to) {
    store_kernel<<<blocks, kThreads, 0, native(ctx.stream)>>>(to, sums.as<float>(), bias,
                                                              bias_dtype, m * n, n, options.beta);
  };
  switch (y.dtype) {
    case DType::kF32:
      launch(y.as<float>());
      break;
    case DType::kBF16:
      launch(y.as<bf16>());
      break;
    default:
      launch(y.as<f16>());
  }
  CUDA_CHECK_LAUNCH("fp8_gemm.store");
}

/// Swizzles both operands' scales into scratch.
void mx(const View& y, const ConstFp8View& x, const ConstFp8View& w, const GemmOptions& options,
        Context& ctx) {
  const MxGemmScratch scratch(x, w, ctx);
  swizzle_mx_scales(scratch.x, x, ctx.stream);
  swizzle_mx_scales(scratch.w, w, ctx.stream);
  cublaslt_gemm(y, {x.codes, scratch.x, x.grouping}, {w.codes, scratch.w, w.grouping}, options,
                ctx);
}

/// Once for a pair of groupings, without building a message on every call.
void say_widened(Grouping x, Grouping w, const char* reason, Device device) {
  static std::atomic<uint32_t> said{0};
  const uint32_t pair = 1u << (static_cast<int>(x) * 4 + static_cast<int>(w));
  if ((said.load(std::memory_order_relaxed) & pair) == 0 && (said.fetch_or(pair) & pair) == 0) {
    log(message("FP8 product of ", to_string(x), " by ", to_string(w), " runs in bf16 on ",
                device_name(device), ": ", reason));
  }
}

/// Our own kernel was asked for, and this is not a product of it.
void say_not_own(const View& y, const ConstFp8View& x, const ConstFp8View& w) {
  const auto key = message("own gemm ", to_string(y.dtype), to_string(x.codes.dtype),
                           to_string(x.grouping), to_string(w.grouping));
  log_once(key,
           message("FP8 products like y ", describe(y), ", x ", describe(x), ", w ", describe(w),
                   " run in cuBLASLt: our own kernel takes e4m3 1x128 by 128x128 "
                   "with N % 16 = 0, into bf16 or f32"));
}

/// Asked of the driver once a device.
template <int (*kAsk)(Device)>
int known(Device device) {
  static std::atomic<int> answers[256];
  std::atomic<int>& mine = answers[device.index & 255];
  int value = mine.load(std::memory_order_relaxed);
  if (value == 0) {
    value = kAsk(device);
    mine.store(value, std::memory_order_relaxed);
  }
  return value;
}

void own_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
              const GemmOptions& options, Context& ctx) {
  Gemm1d2d product;
  product.x = x.codes.data;
  product.x_scales = x.scales.as<float>();
  product.w = w.codes.data;
  product.w_scales = w.scales.as<float>();
  product.y = y.data;
  product.y_is_f32 = y.dtype == DType::kF32;
  product.bias = options.bias ? options.bias->data : nullptr;
  product.beta = options.beta;
  product.m = x.outer();
  product.n = w.outer();
  product.k = x.inner();
  gemm_1d2d(product, product_multiprocessors(known<multiprocessor_count>(ctx.device())),
            ctx.stream.native());
}

void check_limits(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                  const GemmOptions& options) {
  const int64_t n = w.outer(), k = x.inner();
  const auto limits = [&] {
    return message("y ", describe(y), ", x ", describe(x), ", w ", describe(w));
  };
  ROWSHARD_CHECK(k % 16 == 0 && n % 8 == 0, ShapeError, "fp8_gemm on cuda needs K % 16 = 0 (K is ",
                 k, ") and N % 8 = 0 (N is ", n, "): ", limits());
  const DType bias = y.dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  ROWSHARD_CHECK(!options.bias || options.bias->dtype == bias, ShapeError,
                 "fp8_gemm on cuda adds a ", to_string(bias), " bias to a ", to_string(y.dtype),
                 " result; got ", describe(*options.bias));
  ROWSHARD_CHECK(alignment_of(x.codes.data) >= 16 && alignment_of(w.codes.data) >= 16 &&
                     alignment_of(x.scales.data) >= 16 && alignment_of(w.scales.data) >= 16 &&
                     alignment_of(y.data) >= 16,
                 ShapeError, "fp8_gemm on cuda needs 16-byte aligned operands; alignments x ",
                 alignment_of(x.codes.data), " scales ", alignment_of(x.scales.data), ", w ",
                 alignment_of(w.codes.data), " scales ", alignment_of(w.scales.data), ", y ",
                 alignment_of(y.data), ": ", limits());
}

}  // namespace

void fp8_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
              const GemmOptions& options, Context& ctx) {
  const GemmChoice choice = choose_gemm(known<compute_capability>(ctx.device()), x.grouping,
                                        w.grouping, w.outer(), x.inner());
  if (choice.path == GemmPath::kWidened) {
    say_widened(x.grouping, w.grouping, choice.reason, ctx.device());
    return widened(y, x, w, options, ctx);
  }
  check_limits(y, x, w, options);
  if (choice.path == GemmPath::kMx) {
    return mx(y, x, w, options, ctx);
  }
  const GemmBackend backend = gemm_backend();
  if (own_gemm_chosen(backend, y.dtype, x, w)) {
    return own_gemm(y, x, w, options, ctx);
  }
  if (backend == GemmBackend::kOwn) {
    say_not_own(y, x, w);
  }
  if (x.outer() % 8 != 0) {
    return cublaslt_gemm_padded(y, x, w, options, ctx);
  }
  cublaslt_gemm(y, x, w, options, ctx);
}

}  // namespace rowshard::cuda
