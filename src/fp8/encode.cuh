// Loads, conversions and 8-bit packing for kernels that work on chunks of 16 elements, so that a
// thread's codes are one 16-byte access. Kernels that fuse quantisation use these too.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "fp8/formats.h"

namespace rowshard::cuda {

constexpr int kChunk = 16;

/// Two f32 to two codes, `low` in the low byte. Same bytes as encode_e4m3 and encode_e5m2.
template <Fp8Format kFormat>
__device__ inline uint32_t encode_pair(float low, float high) {
  uint16_t pair;
  if constexpr (kFormat == Fp8Format::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}
template <Fp8Format kFormat>
__device__ inline uint32_t encode_four(float a, float b, float c, float d) {
  return __byte_perm(encode_pair<kFormat>(a, b), encode_pair<kFormat>(c, d), 0x5410);
}
/// The two codes of the low half of `pair` as f32.
template <Fp8Format kFormat>
__device__ inline float2 decode_pair(uint32_t pair) {
  uint32_t halves;  // every code is exact in fp16
  const auto codes = static_cast<uint16_t>(pair);
  if constexpr (kFormat == Fp8Format::kE4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
  }
  return {__half2float(__ushort_as_half(static_cast<uint16_t>(halves))),
          __half2float(__ushort_as_half(static_cast<uint16_t>(halves >> 16)))};
}

/// 16 elements of f32, bf16 or f16, kept as loaded (half the registers of f32 for the short types).
template <typename T>
struct Chunk {
  static constexpr int kWords = kChunk * sizeof(T) / 4;
  uint32_t words[kWords];

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      const uint32_t word = words[i / 2];
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      const uint32_t word = words[i / 2];
      return __half2float(__ushort_as_half(static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16)));
    }
  }

  /// `valid` elements from `from`, zeros behind. `vector`: all 16 are there and 16-byte aligned.
  __device__ void load(const T* from, int64_t valid, bool vector) {
    if (vector) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i);
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = i < valid ? std::bit_cast<uint32_t>(from[i]) : 0;
      } else {
        const uint32_t low = 2 * i < valid ? from[2 * i].bits : 0;
        const uint32_t high = 2 * i + 1 < valid ? from[2 * i + 1].bits : 0;
        words[i] = low | high << 16;
      }
    }
  }
};

/// 16 bytes to or from memory that may end early or be unaligned.
__device__ inline uint4 load_bytes(const uint8_t* from, int64_t valid, bool vector) {
  if (vector) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < valid) {
      words[i / 4] |= static_cast<uint32_t>(from[i]) << (i % 4 * 8);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}
__device__ inline void store_bytes(uint8_t* to, const uint4& bytes, int64_t valid, bool vector) {
  if (vector) {
    *reinterpret_cast<uint4*>(to) = bytes;
    return;
  }
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < valid) {
      to[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

inline bool aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace rowshard::cuda
