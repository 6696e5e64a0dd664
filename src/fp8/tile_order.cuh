// What our persistent products share: the order of tiles, and how a kernel of one block a
// multiprocessor is started.
#pragma once

#include <cuda_bf16.h>

#include <atomic>

#include "core/cuda_check.h"
#include "core/view.h"

namespace rowshard::cuda {

/// Tiles of a matrix, walked in groups of rows of tiles, each group column by column: tiles that
/// run together then share rows of both operands, which L2 holds.
struct TileOrder {
  int row_tiles = 0, col_tiles = 0, group = 1;

  TileOrder() = default;
  TileOrder(int64_t rows, int64_t cols, int tile_rows, int tile_cols)
      : row_tiles(static_cast<int>(ceil_div(rows, tile_rows))),
        col_tiles(static_cast<int>(ceil_div(cols, tile_cols))),
        group(1024 / tile_rows) {}

  __host__ __device__ int count() const { return row_tiles * col_tiles; }
  /// {row, column} of a tile.
  __device__ __forceinline__ int2 place(int tile) const {
    const int in_group = group * col_tiles;
    const int first = tile / in_group * group;
    const int rows = min(group, row_tiles - first);
    const int rest = tile % in_group;
    return {first + rest % rows, rest / rows};
  }
  /// As few blocks as need no more rounds than `multiprocessors` would: less to start, and at the
  /// power limit the same speed.
  unsigned blocks(int multiprocessors) const {
    const int64_t rounds = ceil_div(count(), multiprocessors);
    return static_cast<unsigned>(ceil_div(count(), rounds));
  }
};

/// More than 48 KB of shared memory must be asked for, once a device.
template <auto* kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (allowed.load(std::memory_order_relaxed) & bit) {
    return;
  }
  CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed.fetch_or(bit);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&packed);
}

/// sum + beta · old, for two neighbours in memory; a bf16 result is rounded before the addition.
template <typename Out>
__device__ __forceinline__ float2 plus_beta(float2 sum, float beta, const Out* at) {
  float2 old;
  if constexpr (sizeof(Out) == 2) {
    old = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at));
    sum = __bfloat1622float2(__float22bfloat162_rn(sum));
  } else {
    old = *reinterpret_cast<const float2*>(at);
  }
  return {fmaf(beta, old.x, sum.x), fmaf(beta, old.y, sum.y)};
}

}  // namespace rowshard::cuda
