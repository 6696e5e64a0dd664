// Tensor core products of small bf16 tiles: mma.m16n8k16, one warp, f32 sums.
//
// A tile lies in shared memory, row by row, each row padded by 8 elements: rows are then 4 banks
// apart (modulo 32), so that the 8 rows that a fragment touches are read without a bank conflict.
//
// Who holds what (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane = 4·g + t holds, of the
// result, rows g and g + 8 at columns 2t and 2t + 1 of every group of 8 columns.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "core/dtype.h"

namespace rowshard::cuda {

/// Elements between two rows of a tile that is `cols` wide.
template <int kCols>
inline constexpr int kTileStride = kCols + 8;

__device__ inline int lane_row() {
  return threadIdx.x % 32 / 4;
}
__device__ inline int lane_col() {
  return threadIdx.x % 4 * 2;
}

/// Result of a warp: 16 rows, kCols columns. c[n][0], c[n][1]: row g; c[n][2], c[n][3]: row g + 8.
template <int kCols>
struct Accumulators {
  float c[kCols / 8][4];

  __device__ void clear() {
    for (auto& group : c) {
      for (float& value : group)
        value = 0;
    }
  }
};

__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two neighbours of a row, the first in the lower half.
__device__ inline uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// c = A · Bᵀ of tiles that are both kDepth wide: A's 16 rows start at `a`, B has kCols rows.
template <int kCols, int kDepth>
__device__ inline void multiply_rows(Accumulators<kCols>& c, const bf16* a, const bf16* b) {
  constexpr int kStride = kTileStride<kDepth>;
  c.clear();
  const bf16* a_lane = a + lane_row() * kStride + lane_col();
  const bf16* b_lane = b + lane_row() * kStride + lane_col();
  const auto word = [](const bf16* p) { return *reinterpret_cast<const uint32_t*>(p); };
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    const uint32_t fragment[4] = {word(a_lane + k), word(a_lane + 8 * kStride + k),
                                  word(a_lane + k + 8), word(a_lane + 8 * kStride + k + 8)};
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const bf16* row = b_lane + n * 8 * kStride + k;
      mma(c.c[n], fragment, word(row), word(row + 8));
    }
  }
}

/// c += bf16(P) · B with P a result of before, [16, kDepth], and B a tile [kDepth, kCols].
template <int kCols, int kDepth>
__device__ inline void add_product(Accumulators<kCols>& c, const Accumulators<kDepth>& p,
                                   const bf16* b) {
  constexpr int kStride = kTileStride<kCols>;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    // Two groups of 8 columns of a result are, in place, one fragment of 16 columns.
    const auto& low = p.c[2 * k];
    const auto& high = p.c[2 * k + 1];
    const uint32_t fragment[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]),
                                  pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3])};
    // The fragment of B wants two neighbours along kDepth, which is not contiguous: ldmatrix
    // transposes 8×8 blocks on the way. Lanes 0 … 15 name the rows.
    const bf16* row = b + (16 * k + threadIdx.x % 16) * kStride;
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      uint32_t b0, b1;
      const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row + 8 * n));
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                   : "=r"(b0), "=r"(b1)
                   : "r"(address)
                   : "memory");
      mma(c.c[n], fragment, b0, b1);
    }
  }
}

/// Copies rows [first, first + kRows) of a matrix, whose rows are `stride` elements apart, into a
/// tile; rows at and after `limit` become zeros. The whole block takes part; 16 bytes a thread.
template <int kRows, int kCols>
__device__ inline void load_tile(bf16* tile, const bf16* from, int64_t stride, int first,
                                 int limit) {
  constexpr int kChunks = kCols / 8;
  for (int i = threadIdx.x; i < kRows * kChunks; i += blockDim.x) {
    const int row = i / kChunks, col = i % kChunks * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (first + row < limit) {
      value = *reinterpret_cast<const uint4*>(from + (first + row) * stride + col);
    }
    *reinterpret_cast<uint4*>(tile + row * kTileStride<kCols> + col) = value;
  }
}

}  // namespace rowshard::cuda
