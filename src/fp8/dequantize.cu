#include <algorithm>

#include "core/cuda_check.h"
#include "core/error.h"
#include "fp8/encode.cuh"
#include "fp8/quantize.h"
#include "fp8/scale_grid.h"

namespace rowshard::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ uint32_t bits_of(float value) {
  if constexpr (std::is_same_v<T, f16>) {
    return __half_as_ushort(__float2half_rn(value));
  } else {
    return bf16(value).bits;
  }
}

/// 16 values of T, 16 bytes at a time where they fit.
template <typename T>
__device__ void store_values(T* to, const float (&values)[kChunk], int64_t valid, bool vector) {
  if constexpr (sizeof(T) == 4) {
    if (vector) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        reinterpret_cast<float4*>(to)[i] = {values[4 * i], values[4 * i + 1], values[4 * i + 2],
                                            values[4 * i + 3]};
      }
      return;
    }
  } else if (vector) {
    uint32_t words[kChunk / 2];
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      words[i] = bits_of<T>(values[2 * i]) | bits_of<T>(values[2 * i + 1]) << 16;
    }
    reinterpret_cast<uint4*>(to)[0] = {words[0], words[1], words[2], words[3]};
    reinterpret_cast<uint4*>(to)[1] = {words[4], words[5], words[6], words[7]};
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < valid) {
      to[i] = static_cast<T>(values[i]);
    }
  }
}

template <typename T, Fp8Format kFormat>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(T* y, const uint8_t* codes, ScaleGrid grid, int64_t outer, int64_t inner,
                      uint32_t chunks, int inner_shift, bool vector_in, bool vector_out) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;  // 2^36 elements are checked below
  const int64_t o = index / chunks, begin = index % chunks * int64_t{kChunk};
  if (o >= outer) {
    return;
  }
  const int64_t at = o * inner + begin, valid = inner - begin;
  const uint4 bytes = load_bytes(codes + at, valid, vector_in && valid >= kChunk);
  const float scale = grid.at(o, begin >> inner_shift);
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    const float2 pair = decode_pair<kFormat>(words[i / 4] >> (i % 4 * 8));
    values[i] = pair.x * scale;
    values[i + 1] = pair.y * scale;
  }
  store_values(y + at, values, valid, vector_out && valid >= kChunk);
}

template <typename T>
void launch(T* y, const ConstFp8View& x, Stream& stream) {
  const auto* codes = static_cast<const uint8_t*>(x.codes.data);
  const int64_t outer = x.outer(), inner = x.inner(), chunks = ceil_div(inner, kChunk);
  const int inner_shift = is_mx(x.grouping) ? 5 : 7;
  const bool vector_in = inner % 16 == 0 && aligned16(codes);
  const bool vector_out = inner * sizeof(T) % 16 == 0 && aligned16(y);
  ROWSHARD_CHECK(outer * chunks < int64_t{0xffffff00}, ShapeError, "dequantize: ", describe(x),
                 " is too large for one launch");
  const auto blocks = static_cast<unsigned>(ceil_div(outer * chunks, kThreads));
  const auto kernel = x.codes.dtype == DType::kE4M3 ? dequantize_kernel<T, Fp8Format::kE4M3>
                                                    : dequantize_kernel<T, Fp8Format::kE5M2>;
  kernel<<<blocks, kThreads, 0, native(stream)>>>(y, codes, ScaleGrid(x), outer, inner,
                                                  static_cast<uint32_t>(chunks), inner_shift,
                                                  vector_in, vector_out);
  CUDA_CHECK_LAUNCH("dequantize");
}

}  // namespace

void dequantize(const View& y, const ConstFp8View& x, Stream& stream) {
  switch (y.dtype) {
    case DType::kF32:
      return launch(y.as<float>(), x, stream);
    case DType::kBF16:
      return launch(y.as<bf16>(), x, stream);
    default:
      return launch(y.as<f16>(), x, stream);
  }
}

}  // namespace rowshard::cuda
