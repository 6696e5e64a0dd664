// Rows as runs of 16 bytes a lane, whole or cut off at the end of a row, and their 1×128 e4m3
// codes: 16 lanes of bf16 or 32 of f32 hold one group, so its scale is a few shuffles.
//
// What the codes are made from is the value rounded to T, so they are the bytes that quantize()
// makes of the tensor in memory.
#pragma once

#include "fp8/encode.cuh"
#include "fp8/fp8_view.h"
#include "layers/kernel.cuh"

namespace rowshard::cuda {

template <typename T>
using RowPack = Pack<T, kWide<T>>;

/// Elements of a row that a warp takes in one step: loops over a row go up to a multiple of it, so
/// that all lanes take part in the shuffles.
template <typename T>
inline constexpr int64_t kWarpElements = 32 * kWide<T>;

/// The elements at from[0 … valid), zeros behind. `vector`: rows are whole packs at 16 bytes.
template <typename T>
__device__ inline RowPack<T> load_row(const T* from, int64_t valid, bool vector) {
  if (vector && valid >= kWide<T>)
    return load<kWide<T>>(from);
  RowPack<T> pack;
  for (int e = 0; e < kWide<T>; ++e)
    pack.values[e] = e < valid ? from[e] : narrow<T>(0.0f);
  return pack;
}
template <typename T>
__device__ inline void store_row(T* to, const RowPack<T>& pack, int64_t valid, bool vector) {
  if (vector && valid >= kWide<T>) {
    store(to, pack);
    return;
  }
  for (int e = 0; e < kWide<T> && e < valid; ++e)
    to[e] = pack.values[e];
}

/// Where the codes of [rows, width] go; no codes: nowhere.
struct RowCodes {
  uint8_t* codes = nullptr;  // [rows, width]
  float* scales = nullptr;   // [⌈width/128⌉, stride]
  int64_t rows = 0, width = 0, stride = 0;
  bool vector = false;  // rows are whole packs of codes, aligned

  RowCodes() = default;
  RowCodes(const Fp8View* y8, int pack) {
    if (!y8)
      return;
    codes = static_cast<uint8_t*>(y8->codes.data);
    scales = y8->scales.as<float>();
    rows = y8->outer();
    width = y8->inner();
    stride = y8->scales.dim(1);
    vector = width % pack == 0 && reinterpret_cast<uintptr_t>(codes) % pack == 0;
  }
};

/// This lane's pack at (row, column); all lanes of the warp call it, those beyond the row with
/// zeros.
template <typename T>
__device__ inline void quantize_pack(const RowCodes& out, int64_t row, int64_t column,
                                     const RowPack<T>& pack) {
  constexpr int kLanes = 128 / kWide<T>;
  float values[kWide<T>];
  float amax = 0;
#pragma unroll
  for (int e = 0; e < kWide<T>; ++e) {
    values[e] = widen(pack.values[e]);
    amax = fmaxf(amax, fabsf(values[e]));  // fmaxf leaves NaN out
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
  const BlockScale scale =
      block_scale(amax, fp8_max(Fp8Format::kE4M3), true, 0, largest_finite(DTypeOf<T>::value));
  if (column >= out.width)
    return;
  uint32_t words[kWide<T> / 4];
#pragma unroll
  for (int w = 0; w < kWide<T> / 4; ++w) {
    words[w] = encode_four<Fp8Format::kE4M3>(
        values[4 * w] * scale.multiplier, values[4 * w + 1] * scale.multiplier,
        values[4 * w + 2] * scale.multiplier, values[4 * w + 3] * scale.multiplier);
  }
  uint8_t* to = out.codes + row * out.width + column;
  if (out.vector) {
    if constexpr (kWide<T> == 8) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    }
  } else {
    for (int e = 0; e < kWide<T> && column + e < out.width; ++e)
      to[e] = static_cast<uint8_t>(words[e / 4] >> (e % 4 * 8));
  }
  if (column % 128 == 0) {
    float* at = out.scales + column / 128 * out.stride + row;
    at[0] = scale.scale;
    if (row == out.rows - 1) {
      for (int64_t pad = 1; row + pad < out.stride; ++pad)
        at[pad] = 1.0f;
    }
  }
}

}  // namespace rowshard::cuda
