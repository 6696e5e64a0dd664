// cuBLASLt is column-major and its block-scaled products on sm_90 are TN only. Row-major y = x·wᵀ
// [M, N] is the column-major yᵀ [N, M] = A'·B with A = w, B = x, both stored with the contraction
// contiguous: A first, transposed, m = N, n = M, k = K, every leading dimension a row length.
#include "fp8/gemm_cublaslt.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "core/cuda_check.h"
#include "fp8/gemm_scratch.h"

namespace rowshard::cuda {
namespace {

constexpr size_t kOldestVersion = 120900;  // the first with products of block scales

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
  return is_mx(grouping)                  ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0
         : grouping == Grouping::k128x128 ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                          : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
}

/// Everything an algorithm depends on, and nothing else, packed so that a look-up is cheap.
struct Key {
  int64_t m, n, k;
  uint64_t traits;  // bytes, lowest first: device, x, w and y dtype, groupings, alignments, bias

  bool operator==(const Key&) const = default;

  int byte(int at) const { return static_cast<int>(traits >> (8 * at) & 0xff); }
  int device() const { return byte(0); }
  DType x() const { return static_cast<DType>(byte(1)); }
  DType w() const { return static_cast<DType>(byte(2)); }
  DType y() const { return static_cast<DType>(byte(3)); }
  Grouping x_grouping() const { return static_cast<Grouping>(byte(4) & 0xf); }
  Grouping w_grouping() const { return static_cast<Grouping>(byte(4) >> 4); }
  bool bias() const { return byte(5) != 0; }
  /// Of w, x and y in bytes.
  int alignment(int operand) const {
    return 1 << (byte(6 + operand / 2) >> (4 * (operand % 2)) & 0xf);
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0;
    for (const auto part : {static_cast<uint64_t>(key.m), static_cast<uint64_t>(key.n),
                            static_cast<uint64_t>(key.k), key.traits}) {
      hash = (hash ^ part) * 0x9e3779b97f4a7c15ull;  // 2^64 over the golden ratio: mixes upwards
      hash ^= hash >> 32;
    }
    return hash;
  }
};

Key key_of(const View& y, const ConstFp8View& x, const ConstFp8View& w, const GemmOptions& options,
           const Context& ctx) {
  uint64_t traits = 0;
  int shift = 0;
  const auto add = [&](int value, int bits) {
    traits |= static_cast<uint64_t>(value) << shift;
    shift += bits;
  };
  const auto log2_alignment = [](const void* pointer) {
    return __builtin_ctz(static_cast<unsigned>(alignment_of(pointer)));
  };
  add(ctx.device().index, 8);
  add(static_cast<int>(x.codes.dtype), 8);
  add(static_cast<int>(w.codes.dtype), 8);
  add(static_cast<int>(y.dtype), 8);
  add(static_cast<int>(x.grouping), 4);
  add(static_cast<int>(w.grouping), 4);
  add(options.bias.has_value(), 8);
  add(log2_alignment(w.codes.data), 4);
  add(log2_alignment(x.codes.data), 4);
  add(log2_alignment(y.data), 4);
  return {x.outer(), w.outer(), x.inner(), traits};
}

std::string describe(const Key& key) {
  return message("cuBLASLt product y [", key.m, ", ", key.n, "] ", to_string(key.y()), " = x [",
                 key.m, ", ", key.k, "] ", to_string(key.x()), " ", to_string(key.x_grouping()),
                 " by w [", key.n, ", ", key.k, "] ", to_string(key.w()), " ",
                 to_string(key.w_grouping()), "; as cuBLASLt sees it: m ", key.n, ", n ", key.m,
                 ", k ", key.k, ", lda ", key.k, ", ldb ", key.k, ", ldd ", key.n,
                 ", TN, scale modes A ", static_cast<int>(scale_mode(key.w_grouping())), ", B ",
                 static_cast<int>(scale_mode(key.x_grouping())),
                 key.bias() ? ", bias" : ", no bias", "; alignments of w, x, y ", key.alignment(0),
                 ", ", key.alignment(1), ", ", key.alignment(2), "; cuBLASLt ",
                 cublasLtGetVersion(), ", built against ", CUBLAS_VERSION);
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

/// Pointers that cuBLASLt keeps in the descriptor.
struct Pointers {
  const void* w_scales;
  const void* x_scales;
  const void* bias;
};

class Plan {
 public:
  Plan(const Key& key, cublasLtHandle_t library, const Pointers& pointers) : library_(library) {
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&op_.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(key.w_grouping()));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(key.x_grouping()));
    if (key.bias()) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, key.y() == DType::kF16 ? CUDA_R_16F : CUDA_R_16BF);
    }
    if (gemm_multiprocessors() > 0)
      set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t{gemm_multiprocessors()});
    point(pointers);  // the heuristic looks at them: a descriptor without is refused
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&a_.handle, cuda_type(key.w()), key.k, key.n, key.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&b_.handle, cuda_type(key.x()), key.k, key.m, key.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&d_.handle, cuda_type(key.y()), key.n, key.m, key.n));
    algorithm_ = candidates(key, 1).list[0].algo;
  }

  void point(const Pointers& now) {
    update(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers_.w_scales, now.w_scales);
    update(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers_.x_scales, now.x_scales);
    update(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers_.bias, now.bias);
  }

  /// `algorithm`: null for the plan's own.
  void run(const View& y, const void* x_codes, const void* w_codes, float beta, void* workspace,
           cudaStream_t stream, const cublasLtMatmulAlgo_t* algorithm = nullptr) const {
    const float alpha = 1;
    CUBLAS_CHECK(cublasLtMatmul(library_, op_.handle, &alpha, w_codes, a_.handle, x_codes,
                                b_.handle, &beta, y.data, d_.handle, y.data, d_.handle,
                                algorithm ? algorithm : &algorithm_, workspace, kGemmWorkspace,
                                stream));
  }

  /// What cuBLASLt proposes, best guess first; at least one.
  Candidates candidates(const Key& key, int most) const {
    Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference.handle));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      CUBLAS_CHECK(
          cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmWorkspace));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.alignment(0)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.alignment(1)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.alignment(2)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.alignment(2)));
    Candidates found;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        library_, op_.handle, a_.handle, b_.handle, d_.handle, d_.handle, preference.handle, most,
        found.list, &found.count);
    ROWSHARD_CHECK(status == CUBLAS_STATUS_SUCCESS && found.count > 0, DeviceError,
                   "no algorithm for ", describe(key), ": ", cublasLtGetStatusName(status));
    return found;
  }

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(op_.handle, attribute, &value, sizeof value));
  }
  void update(cublasLtMatmulDescAttributes_t attribute, const void*& known, const void* now) {
    if (known != now) {
      set(attribute, now);
      known = now;
    }
  }

  cublasLtHandle_t library_;
  Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> op_;
  Layout a_, b_, d_;
  cublasLtMatmulAlgo_t algorithm_;
  Pointers pointers_{};  // in the descriptor now
};

struct Cache {
  std::mutex mutex;
  std::unordered_map<int, cublasLtHandle_t> libraries;
  std::unordered_map<Key, Plan, KeyHash> plans;

  cublasLtHandle_t library(int device) {
    cublasLtHandle_t& handle = libraries[device];
    if (!handle) {
      ROWSHARD_CHECK(cublasLtGetVersion() >= kOldestVersion, DeviceError, "cuBLASLt ",
                     cublasLtGetVersion(), " has no block-scaled FP8 products: ", kOldestVersion,
                     " or newer is needed (built against ", CUBLAS_VERSION, ")");
      CUBLAS_CHECK(cublasLtCreate(&handle));
    }
    return handle;
  }
  Plan& plan(const Key& key, const Pointers& pointers) {
    auto found = plans.find(key);
    if (found == plans.end()) {
      found = plans.try_emplace(key, key, library(key.device()), pointers).first;
    }
    found->second.point(pointers);
    return found->second;
  }
};
Cache& cache() {
  static Cache* cache = new Cache;  // never destroyed: streams may outlive static destruction
  return *cache;
}

Pointers pointers_of(const ConstFp8View& x, const ConstFp8View& w, const GemmOptions& options) {
  return {w.scales.data, x.scales.data, options.bias ? options.bias->data : nullptr};
}

}  // namespace

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(std::min<uintptr_t>(256, address & (~address + 1)));
}

void cublaslt_gemm(const View& y, const ConstFp8View& x, const ConstFp8View& w,
                   const GemmOptions& options, Context& ctx) {
  const Key key = key_of(y, x, w, options, ctx);
  const Buffer workspace = gemm_workspace(ctx);
  Cache& shared = cache();
  std::lock_guard lock(shared.mutex);
  shared.plan(key, pointers_of(x, w, options))
      .run(y, x.codes.data, w.codes.data, options.beta, workspace.data(), native(ctx.stream));
}

std::vector<double> time_gemm_algorithms(const View& y, const ConstFp8View& x,
                                         const ConstFp8View& w, int repeats, Context& ctx) {
  const Key key = key_of(y, x, w, {}, ctx);
  const Buffer workspace = gemm_workspace(ctx);
  Cache& shared = cache();
  std::lock_guard lock(shared.mutex);
  const Plan& plan = shared.plan(key, pointers_of(x, w, {}));
  const Candidates candidates = plan.candidates(key, Candidates::kMost);
  Event begin(ctx.device(), true), end(ctx.device(), true);
  std::vector<double> medians;
  for (int i = 0; i < candidates.count; ++i) {
    std::vector<double> us;
    for (int r = -2; r < repeats; ++r) {
      begin.record(ctx.stream);
      plan.run(y, x.codes.data, w.codes.data, 0, workspace.data(), native(ctx.stream),
               &candidates.list[i].algo);
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

double time_bare_call(const View& y, const ConstFp8View& x, const ConstFp8View& w, int calls,
                      Context& ctx) {
  const Buffer workspace = gemm_workspace(ctx);
  Cache& shared = cache();
  std::lock_guard lock(shared.mutex);
  const Plan& plan = shared.plan(key_of(y, x, w, {}, ctx), pointers_of(x, w, {}));
  const double start = now_seconds();
  for (int i = 0; i < calls; ++i) {
    plan.run(y, x.codes.data, w.codes.data, 0, workspace.data(), native(ctx.stream));
  }
  const double seconds = now_seconds() - start;
  ctx.stream.synchronize();
  return seconds * 1e6 / calls;
}

}  // namespace rowshard::cuda
