// What the kernels of this room share: 16-byte loads and stores, sums over a block in a fixed
// order, and launch sizes.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "core/cuda_check.h"
#include "core/view.h"

namespace rowshard::cuda {

/// kWidth neighbouring elements, moved by one instruction when that is 16 bytes.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};
template <int kWidth, typename T>
__device__ inline Pack<T, kWidth> load(const T* from) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(from);
}
template <int kWidth, typename T>
__device__ inline void store(T* to, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}

template <typename T>
inline constexpr int kWide = 16 / static_cast<int>(sizeof(T));

/// True when runs of `length` elements at these addresses can be moved kWide<T> at a time.
template <typename T>
bool wide(int64_t length, std::initializer_list<const void*> pointers) {
  bool fits = length % kWide<T> == 0;
  for (const void* pointer : pointers)
    fits = fits && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  return fits;
}

inline constexpr int kThreads = 256;

/// Blocks for a grid-stride loop over `items`: several waves on the largest Hopper.
inline unsigned grid_for(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(items, kThreads), 1, 132 * 16));
}
/// Threads of a block that owns one row of `packs` packs.
inline unsigned threads_for_row(int64_t packs, int64_t most) {
  return static_cast<unsigned>(std::clamp<int64_t>(round_up(packs, 32), 32, most));
}

__device__ inline float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

/// The sum over the block, in every thread. Every thread of the block calls it.
__device__ inline float block_sum(float value) {
  __shared__ float warps[32];
  value = warp_sum(value);
  __syncthreads();  // the shared row may still be read by an earlier call
  if (threadIdx.x % 32 == 0)
    warps[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_sum(lane < (blockDim.x + 31) / 32 ? warps[lane] : 0.0f);
}

}  // namespace rowshard::cuda
