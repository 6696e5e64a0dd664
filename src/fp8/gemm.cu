// cuBLASLt is column-major and its FP8 products on sm_90 are TN only. Row-major y = x·wᵀ [M, N] is
// the column-major yᵀ [N, M] = A'·B with A = w, B = x, both stored with the contraction contiguous:
// A first, transposed, m = N, n = M, k = K, every leading dimension a row length.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "core/cuda_check.h"
#include "core/log.h"
#include "core/matmul.h"
#include "fp8/gemm.h"
#include "fp8/gemm_scratch.h"
#include "fp8/quantize.h"

namespace rowshard::cuda {
namespace {

constexpr int kThreads = 256;

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_16F;
  }
}

cublasLtMatmulMatrixScale_t scale_mode(Grouping grouping) {
  return grouping == Grouping::k128x128 ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                        : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
}

/// Everything an algorithm depends on, and nothing else.
struct Key {
  int device;
  int64_t m, n, k;
  DType x, w, y;
  Grouping x_grouping, w_grouping;
  bool bias;
  std::array<int, 3> alignments;  // of w, x and y in bytes, at most 256
  auto operator<=>(const Key&) const = default;
};

std::string describe(const Key& key) {
  return message("cuBLASLt block-scaled product y [", key.m, ", ", key.n, "] ", to_string(key.y),
                 " = x [", key.m, ", ", key.k, "] ", to_string(key.x), " ",
                 to_string(key.x_grouping), " by w [", key.n, ", ", key.k, "] ", to_string(key.w),
                 " ", to_string(key.w_grouping), "; as cuBLASLt sees it: m ", key.n, ", n ", key.m,
                 ", k ", key.k, ", lda ", key.k, ", ldb ", key.k, ", ldd ", key.n, ", TN, ",
                 key.bias ? "bias" : "no bias", "; alignments of w, x, y ", key.alignments[0], ", ",
                 key.alignments[1], ", ", key.alignments[2], "; cuBLASLt ", cublasLtGetVersion(),
                 ", built against ", CUBLAS_VERSION);
}

template <typename Handle, cublasStatus_t (*kDestroy)(Handle)>
struct Owned {
  Handle handle = nullptr;
  Owned() = default;
  ~Owned() {
    if (handle) {
      kDestroy(handle);
    }
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
};
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;

/// An array, not a vector: nvcc 13.0 fails inside on a container of cuBLASLt's unnamed structs.
struct Candidates {
  static constexpr int kMost = 16;
  cublasLtMatmulHeuristicResult_t list[kMost];
  int count = 0;
};

struct Plan {
  Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> op;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algorithm;

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(op.handle, attribute, &value, sizeof value));
  }

  /// The heuristic looks at the pointers: a descriptor without them is refused.
  Plan(const Key& key, cublasLtHandle_t library, const void* w_scales, const void* x_scales,
       const void* bias) {
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&op.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(key.w_grouping));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(key.x_grouping));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w_scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scales);
    if (key.bias) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, key.y == DType::kF16 ? CUDA_R_16F : CUDA_R_16BF);
    }
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&a.handle, cuda_type(key.w), key.k, key.n, key.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&b.handle, cuda_type(key.x), key.k, key.m, key.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&d.handle, cuda_type(key.y), key.n, key.m, key.n));

    algorithm = candidates(key, library, 1).list[0].algo;
  }

  /// What cuBLASLt proposes, best guess first; at least one.
  Candidates candidates(const Key& key, cublasLtHandle_t library, int most) const {
    Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference.handle));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      CUBLAS_CHECK(
          cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmWorkspace));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.alignments[0]));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.alignments[1]));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.alignments[2]));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.alignments[2]));
    Candidates found;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(library, op.handle, a.handle, b.handle, d.handle, d.handle,
                                       preference.handle, most, found.list, &found.count);
    ROWSHARD_CHECK(status == CUBLAS_STATUS_SUCCESS && found.count > 0, DeviceError,
                   "no algorithm for ", describe(key), ": ", cublasLtGetStatusName(status));
    return found;
  }
};

// Plans live as long as the process. The lock is held over the call too, because operand pointers
// are attributes of the shared descriptor.
struct Cache {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> libraries;
  std::map<Key, Plan> plans;

  cublasLtHandle_t library(int device) {
    cublasLtHandle_t& handle = libraries[device];
    if (!handle) {
      CUBLAS_CHECK(cublasLtCreate(&handle));
    }
    return handle;
  }
  Plan& plan(const Key& key, const void* w_scales, const void* x_scales, const void* bias) {
    auto found = plans.find(key);
    if (found == plans.end()) {
      found = plans.try_emplace(key, key, library(key.device), w_scales, x_scales, bias).first;
      return found->second;
    }
    Plan& plan = found->second;
    plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w_scales);
    plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scales);
    if (key.bias) {
      plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    return plan;
  }
};
Cache& cache() {
  static Cache* cache = new Cache;  // never destroyed: streams may outlive static destruction
  return *cache;
}

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(std::min<uintptr_t>(256, address & (~address + 1)));
}

Key key_of(const View& y, const ConstFp8View& x, const ConstFp8View& w, const GemmOptions& options,
           const Context& ctx) {
  return {ctx.device().index,
          x.outer(),
          w.outer(),
          x.inner(),
          x.codes.dtype,
          w.codes.dtype,
          y.dtype,
          x.grouping,
          w.grouping,
          options.bias.has_value(),
          {alignment_of(w.codes.data), alignment_of(x.codes.data), alignment_of(y.data)}};
}

/// The one way from a product to cuBLASLt; M is a multiple of 8 here. `algorithm`: not the plan's.
void block_scaled(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                  const GemmOptions& options, Context& ctx,
                  const cublasLtMatmulAlgo_t* algorithm = nullptr) {
  const Key key = key_of(y, x, w, options, ctx);
  const Buffer workspace = gemm_workspace(ctx);
  Cache& shared = cache();
  std::lock_guard lock(shared.mutex);
  Plan& plan =
      shared.plan(key, w.scales.data, x.scales.data, options.bias ? options.bias->data : nullptr);
  const float alpha = 1;
  CUBLAS_CHECK(cublasLtMatmul(shared.library(key.device), plan.op.handle, &alpha, w.codes.data,
                              plan.a.handle, x.codes.data, plan.b.handle, &options.beta, y.data,
                              plan.d.handle, y.data, plan.d.handle,
                              algorithm ? algorithm : &plan.algorithm, workspace.data(),
                              kGemmWorkspace, native(ctx.stream)));
}

/// M rounded up to 8 in scratch: rows of zero codes; their results are not copied out.
void block_scaled_padded(const View& y, const ConstFp8View& x, const ConstFp8View& w,
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
  block_scaled(result_view, padded_x, w, options, ctx);
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
  const int64_t m = x.outer(), n = w.outer(), k = x.inner();
  const auto scratch = [&](const char* name, DType dtype, int64_t rows, int64_t cols) {
    return ctx.arena.tensor(Category::kWorkspace, name, dtype, {rows, cols});
  };
  const Tensor wide_x = scratch("gemm.wide.x", DType::kBF16, m, k);
  const Tensor wide_w = scratch("gemm.wide.w", DType::kBF16, n, k);
  const Tensor sums = scratch("gemm.wide.y", DType::kF32, m, n);
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

/// Once for a pair of groupings, without building a message on every call.
void say_widened(Grouping x, Grouping w, Device device) {
  static std::atomic<uint32_t> said{0};
  const uint32_t pair = 1u << (static_cast<int>(x) * 4 + static_cast<int>(w));
  if ((said.fetch_or(pair) & pair) == 0) {
    log(message("FP8 product of ", to_string(x), " by ", to_string(w),
                " runs in bf16: cuBLASLt has no such FP8 product on ", device_name(device)));
  }
}

/// Asked of the driver once a device.
int capability(Device device) {
  static std::mutex mutex;
  static std::map<int, int> known;
  std::lock_guard lock(mutex);
  auto [at, inserted] = known.try_emplace(device.index, 0);
  if (inserted) {
    at->second = compute_capability(device);
  }
  return at->second;
}

}  // namespace

void fp8_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
              const GemmOptions& options, Context& ctx) {
  const bool both_square = x.grouping == Grouping::k128x128 && w.grouping == Grouping::k128x128;
  if (is_mx(x.grouping) || both_square || capability(ctx.device()) != 90) {
    say_widened(x.grouping, w.grouping, ctx.device());
    return widened(y, x, w, options, ctx);
  }
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
  if (x.outer() % 8 != 0) {
    return block_scaled_padded(y, x, w, options, ctx);
  }
  block_scaled(y, x, w, options, ctx);
}

/// For the bench: microseconds of each of cuBLASLt's candidates, the one fp8_gemm uses first.
std::vector<double> time_gemm_algorithms(const View& y, const ConstFp8View& x,
                                         const ConstFp8View& w, int repeats, Context& ctx) {
  const Key key = key_of(y, x, w, {}, ctx);
  Candidates candidates;
  {
    Cache& shared = cache();
    std::lock_guard lock(shared.mutex);
    candidates = shared.plan(key, w.scales.data, x.scales.data, nullptr)
                     .candidates(key, shared.library(key.device), Candidates::kMost);
  }
  Event begin(ctx.device(), true), end(ctx.device(), true);
  std::vector<double> medians;
  for (int i = 0; i < candidates.count; ++i) {
    std::vector<double> us;
    for (int r = -2; r < repeats; ++r) {
      begin.record(ctx.stream);
      block_scaled(y, x, w, {}, ctx, &candidates.list[i].algo);
      end.record(ctx.stream);
      const double once = elapsed_ms(begin, end) * 1e3;
      if (r >= 0) {
        us.push_back(once);
      }
    }
    std::sort(us.begin(), us.end());
    medians.push_back(us[us.size() / 2]);
  }
  return medians;
}

}  // namespace rowshard::cuda
