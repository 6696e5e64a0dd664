// cuBLASLt is column-major: a row-major C = op(A)·op(B) is computed as Cᵀ = op(B)ᵀ·op(A)ᵀ, so B
// comes first and every leading dimension is a row length.
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "core/cuda_check.h"
#include "core/matmul.h"

namespace rowshard::cuda {
namespace {

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    default:
      throw ShapeError(message("matmul on cuda: ", to_string(dtype), " operands; use f32 or bf16"));
  }
}

struct Layout {
  cublasLtMatrixLayout_t handle = nullptr;
  Layout(DType dtype, int64_t rows, int64_t cols, int64_t ld) {
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&handle, cuda_type(dtype), rows, cols, ld));
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(handle); }
  Layout(const Layout&) = delete;
};

// Everything that depends on shapes and types only; made once, kept for the process.
struct Plan {
  cublasLtMatmulDesc_t op = nullptr;
  Layout a, b, c;
  cublasLtMatmulAlgo_t algorithm;

  Plan(DType type, DType result, bool transpose_a, bool transpose_b, int64_t m, int64_t n,
       int64_t k, cublasLtHandle_t handle, int alignment)
      : a(type, transpose_b ? k : n, transpose_b ? n : k, transpose_b ? k : n),
        b(type, transpose_a ? m : k, transpose_a ? k : m, transpose_a ? m : k),
        c(result, n, m, n) {
    // f32 operands keep f32 products: tf32 would not be the oracle's sum.
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t first = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    cublasLtMatmulPreference_t preference = nullptr;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const uint64_t workspace = kCudaMatmulWorkspace;
    const uint32_t bytes = alignment;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &workspace, sizeof workspace);
    for (auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      cublasLtMatmulPreferenceSetAttribute(preference, attribute, &bytes, sizeof bytes);
    }
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, op, a.handle, b.handle, c.handle, c.handle, preference, 1, &found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    ROWSHARD_CHECK(status == CUBLAS_STATUS_SUCCESS && count > 0, DeviceError,
                   "cuBLASLt has no algorithm for a ", to_string(type), " product of M ", m, " N ",
                   n, " K ", k, " (pointer alignment ", alignment,
                   "): ", cublasLtGetStatusName(status));
    algorithm = found.algo;
  }
  ~Plan() { cublasLtMatmulDescDestroy(op); }
  Plan(const Plan&) = delete;
};

struct Library {
  cublasLtHandle_t handle = nullptr;
  Library() { CUBLAS_CHECK(cublasLtCreate(&handle)); }
};

Library& library(int device) {
  static std::mutex mutex;
  static std::map<int, Library> libraries;
  std::lock_guard lock(mutex);
  return libraries[device];
}

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  int alignment = 256;
  while (address % alignment != 0)
    alignment /= 2;
  return alignment;
}

}  // namespace

void matmul(const View& c, const ConstView& a, Transpose transpose_a, const ConstView& b,
            Transpose transpose_b, int64_t m, int64_t n, int64_t k, float alpha, float beta,
            Context& ctx) {
  const bool ta = transpose_a == Transpose::kYes;
  const bool tb = transpose_b == Transpose::kYes;
  const int alignment =
      std::min({alignment_of(a.data), alignment_of(b.data), alignment_of(c.data)});
  using Key = std::tuple<int, DType, DType, bool, bool, int64_t, int64_t, int64_t, int>;
  static std::mutex mutex;
  static std::map<Key, Plan> plans;
  const int device = ctx.device().index;
  cublasLtHandle_t handle = library(device).handle;
  const Plan* plan;
  {
    std::lock_guard lock(mutex);
    const Key key{device, a.dtype, c.dtype, ta, tb, m, n, k, alignment};
    auto found = plans.find(key);
    if (found == plans.end()) {
      found = plans.try_emplace(key, a.dtype, c.dtype, ta, tb, m, n, k, handle, alignment).first;
    }
    plan = &found->second;
  }
  Buffer workspace =
      ctx.arena.allocate(Category::kWorkspace, "matmul.workspace", kCudaMatmulWorkspace);
  CUBLAS_CHECK(cublasLtMatmul(handle, plan->op, &alpha, b.data, plan->a.handle, a.data,
                              plan->b.handle, &beta, c.data, plan->c.handle, c.data, plan->c.handle,
                              &plan->algorithm, workspace.data(), kCudaMatmulWorkspace,
                              native(ctx.stream)));
}

}  // namespace rowshard::cuda
