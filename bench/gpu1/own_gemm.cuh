// What own_gemm.cu compares: operands of our FP8 products, random and each block of its own scale,
// and cuBLASLt's product of the same operands.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/cuda_check.h"
#include "fp8/gemm_1d2d.h"
#include "fp8/rebuild.h"

namespace own_gemm {

using rowshard::ConstView;
using rowshard::Device;
using rowshard::DeviceKind;
using rowshard::DType;
using rowshard::native;
using rowshard::Stream;
using rowshard::View;
constexpr Device kGpu{DeviceKind::kCuda, 0};

using rowshard::cuda::Gemm1d2d;
using rowshard::cuda::kGemm1d2dTileCount;
using rowshard::cuda::kGemm1d2dTiles;

inline int64_t up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}
inline int64_t blocks_of(int64_t size) {
  return (size + 127) / 128;
}

__device__ uint32_t mix(uint64_t i, uint32_t seed) {
  uint64_t z = i * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(z >> 32);
}
__device__ float uniform(uint64_t i, uint32_t seed) {
  return (mix(i, seed) + 0.5f) * 0x1p-32f;
}
__device__ float normal(uint64_t i, uint32_t seed) {
  return sqrtf(-2 * logf(uniform(i, seed))) * cospif(2 * uniform(i, seed + 77));
}
/// Normal values, the largest of a block near 448.
__global__ void fill_codes(__nv_fp8_e4m3* codes, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    codes[i] = __nv_fp8_e4m3(normal(i, seed) * 120);
  }
}
/// kind 0: any mantissa; 1: powers of two; 2: any mantissa, magnitudes far apart.
__global__ void fill_scales(float* scales, size_t count, uint32_t seed, int kind) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const float exponent = floorf(uniform(i, seed) * (kind == 2 ? 40 : 5)) - (kind == 2 ? 30 : 10);
    scales[i] = exp2f(exponent) * (kind == 1 ? 1 : 1 + uniform(i, seed + 5));
  }
}
__global__ void fill_bf16(__nv_bfloat16* values, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    values[i] = __float2bfloat16(normal(i, seed));
  }
}
__global__ void fill_f32(float* values, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    values[i] = normal(i, seed);
  }
}
/// x scales [blocks, from_stride] to a narrower stride.
__global__ void restride(const float* from, float* to, int blocks, int from_stride, int to_stride,
                         int rows) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < blocks * to_stride;
       i += gridDim.x * blockDim.x) {
    const int block = i / to_stride, row = i % to_stride;
    to[i] = row < rows ? from[block * from_stride + row] : 1;
  }
}
/// w [n, k] and its scales to w_rowwise [k, n], one thread an element: plainly right.
__global__ void transpose(const uint8_t* w, const float* scales, uint8_t* to, float* scales_to,
                          int64_t n, int64_t k) {
  const int64_t n_blocks = (n + 127) / 128, k_blocks = (k + 127) / 128;
  const int64_t stride = (k_blocks + 3) / 4 * 4, stride_to = (n_blocks + 3) / 4 * 4;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n * k; i += gridDim.x * blockDim.x) {
    const int64_t row = i / k, col = i % k;
    to[col * n + row] = w[i];
    if (row % 128 == 0 && col % 128 == 0) {
      scales_to[col / 128 * stride_to + row / 128] = scales[row / 128 * stride + col / 128];
    }
  }
}
/// Counts words that differ, and words that are neither zero nor the poison.
__global__ void compare(const uint16_t* a, const uint16_t* b, size_t count,
                        unsigned long long* result) {
  unsigned long long different = 0, alive = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    different += a[i] != b[i];
    alive += b[i] != 0 && b[i] != 0xabab;
  }
  atomicAdd(result, different);
  atomicAdd(result + 1, alive);
}

template <typename T>
struct Memory {
  T* data = nullptr;
  explicit Memory(size_t count) {
    CUDA_CHECK(cudaMalloc(&data, std::max<size_t>(count * sizeof(T), 16)));
  }
  Memory(Memory&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  ~Memory() { cudaFree(data); }
};

/// One set of operands. x has its rows rounded up to 8 for cuBLASLt, and scales in both strides.
struct Operands {
  int64_t m, n, k, rows;
  Memory<__nv_fp8_e4m3> x, w;
  Memory<float> x_scales, x_scales_padded, w_scales;
  // For the dgrad, w is the columnwise copy and this the rowwise one: [k, n].
  Memory<uint8_t> w_rowwise;
  Memory<float> w_rowwise_scales;
  Memory<uint8_t> y, y_wanted;  // f32 or bf16, with a guard behind
  Memory<__nv_bfloat16> bias;
  static constexpr size_t kGuard = 4096;

  size_t y_bytes(bool f32) const { return rows * n * (f32 ? 4 : 2); }

  Operands(int64_t m_, int64_t n_, int64_t k_, uint32_t seed, int kind, bool f32 = true)
      : m(m_),
        n(n_),
        k(k_),
        rows(up(m_, 8)),
        x(rows * k),
        w(n * k),
        x_scales(blocks_of(k) * up(m, 4)),
        x_scales_padded(blocks_of(k) * rows),
        w_scales(blocks_of(n) * up(blocks_of(k), 4)),
        w_rowwise(n * k),
        w_rowwise_scales(blocks_of(k) * up(blocks_of(n), 4)),
        y(y_bytes(f32) + kGuard),
        y_wanted(y_bytes(f32) + kGuard),
        bias(n) {
    fill_codes<<<1024, 256>>>(x.data, rows * k, seed);
    fill_codes<<<1024, 256>>>(w.data, n * k, seed + 1);
    fill_scales<<<64, 256>>>(x_scales_padded.data, blocks_of(k) * rows, seed + 2, kind);
    restride<<<64, 256>>>(x_scales_padded.data, x_scales.data, static_cast<int>(blocks_of(k)),
                          static_cast<int>(rows), static_cast<int>(up(m, 4)), static_cast<int>(m));
    fill_scales<<<64, 256>>>(w_scales.data, blocks_of(n) * up(blocks_of(k), 4), seed + 3, kind);
    fill_bf16<<<64, 256>>>(bias.data, n, seed + 4);
    transpose<<<1024, 256>>>(reinterpret_cast<const uint8_t*>(w.data), w_scales.data,
                             w_rowwise.data, w_rowwise_scales.data, n, k);
    CUDA_CHECK(cudaGetLastError());
  }
  void rebuild(Stream& stream) const {
    const int64_t k_blocks = blocks_of(k), n_blocks = blocks_of(n);
    rowshard::rebuild_columnwise(
        {View(w.data, DType::kE4M3, {n, k}, kGpu),
         View(w_scales.data, DType::kF32, {n_blocks, up(k_blocks, 4)}, kGpu),
         rowshard::Grouping::k128x128},
        {ConstView(w_rowwise.data, DType::kE4M3, {k, n}, kGpu),
         ConstView(w_rowwise_scales.data, DType::kF32, {k_blocks, up(n_blocks, 4)}, kGpu),
         rowshard::Grouping::k128x128},
        stream);
  }
  /// dx = y, dy = x; the weight's N is k here and its K is n.
  Gemm1d2d dgrad(bool f32, float beta) const {
    Gemm1d2d g = product(f32, false, beta);
    g.w = w_rowwise.data;
    g.w_scales = w_rowwise_scales.data;
    g.transpose_w = true;
    return g;
  }
  Gemm1d2d product(bool f32, bool with_bias, float beta) const {
    Gemm1d2d g;
    g.x = x.data;
    g.x_scales = x_scales.data;
    g.w = w.data;
    g.w_scales = w_scales.data;
    g.y = y.data;
    g.y_is_f32 = f32;
    g.bias = with_bias ? bias.data : nullptr;
    g.beta = beta;
    g.m = m;
    g.n = n;
    g.k = k;
    return g;
  }
};

/// cuBLASLt's block-scaled product of one shape, first proposal of its heuristic.
struct Lt {
  static constexpr size_t kWorkspace = (size_t{32} << 20) + 1024;
  cublasLtMatmulDesc_t op{};
  cublasLtMatrixLayout_t a{}, b{}, d{};
  cublasLtMatmulAlgo_t algorithm;

  static cublasLtHandle_t library() {
    static cublasLtHandle_t handle = [] {
      cublasLtHandle_t h;
      CUBLAS_CHECK(cublasLtCreate(&h));
      return h;
    }();
    return handle;
  }
  static void* workspace() {
    static void* space = [] {
      void* p;
      CUDA_CHECK(cudaMalloc(&p, kWorkspace));
      return p;
    }();
    return space;
  }
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(op, attribute, &value, sizeof value));
  }

  Lt(const Operands& o, bool f32, bool with_bias) {
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(o.w_scales.data));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(o.x_scales_padded.data));
    if (with_bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(o.bias.data));
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
    }
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&a, CUDA_R_8F_E4M3, o.k, o.n, o.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&b, CUDA_R_8F_E4M3, o.k, o.rows, o.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&d, f32 ? CUDA_R_32F : CUDA_R_16BF, o.n, o.rows, o.n));
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const uint64_t most = kWorkspace;
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
    cublasLtMatmulHeuristicResult_t found[1];
    int count = 0;
    CUBLAS_CHECK(
        cublasLtMatmulAlgoGetHeuristic(library(), op, a, b, d, d, preference, 1, found, &count));
    ROWSHARD_CHECK(count == 1, rowshard::DeviceError, "no algorithm for ", o.m, " ", o.n, " ", o.k);
    algorithm = found[0].algo;
    cublasLtMatmulPreferenceDestroy(preference);
  }
  Lt(const Lt&) = delete;
  ~Lt() {
    cublasLtMatmulDescDestroy(op);
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatrixLayoutDestroy(b);
    cublasLtMatrixLayoutDestroy(d);
  }
  void run(const Operands& o, float beta, cudaStream_t stream) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(o.w_scales.data));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(o.x_scales_padded.data));
    const float one = 1;
    CUBLAS_CHECK(cublasLtMatmul(library(), op, &one, o.w.data, a, o.x.data, b, &beta,
                                o.y_wanted.data, d, o.y_wanted.data, d, &algorithm, workspace(),
                                kWorkspace, stream));
  }
};

}  // namespace own_gemm
