// One thread block quantises one 128×128 tile, in every direction asked for, reading it once.
//
// 256 threads; a thread holds a patch of 4 consecutive rows × 16 consecutive columns (ByteTile's),
// so 8 neighbouring lanes hold 128 columns of 4 rows: a rowwise group is reduced by shuffles, a
// columnwise one by shuffles and shared memory. Input stays in registers as loaded. Rowwise codes
// are one 16-byte store a row; columnwise codes go through the byte tile.
#pragma once

#include "core/cuda_check.h"
#include "core/error.h"
#include "fp8/byte_tile.cuh"
#include "fp8/quantize.h"

namespace rowshard::cuda {

struct QuantizeParams {
  const void* x;  // [rows, cols]
  int64_t rows, cols;
  uint8_t* row_codes;  // [rows, cols], or null
  void* row_scales;
  int64_t row_stride;  // row length of the scale matrix, padding included
  uint8_t* col_codes;  // [cols, rows], or null
  void* col_scales;
  int64_t col_stride;
  float largest_input;
  bool power_of_two;
  float amax_epsilon;
  const float* skip;
  bool vector_x, vector_rows, vector_columns;  // 16-byte accesses fit
};

namespace quantize_detail {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = kTileThreads / 32;

__device__ inline float max_over(float value, int lane_mask) {
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, lane_mask));
}

/// 16 codes of one row.
template <typename T, Fp8Format kFormat>
__device__ uint4 encode_row(const Chunk<T>& x, float multiplier) {
  uint32_t words[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    words[q] = encode_four<kFormat>(x[4 * q] * multiplier, x[4 * q + 1] * multiplier,
                                    x[4 * q + 2] * multiplier, x[4 * q + 3] * multiplier);
  }
  return {words[0], words[1], words[2], words[3]};
}

template <Grouping kGrouping, Fp8Format kFormat, typename T, bool kColumnwise>
struct Quantizer {
  static constexpr bool kMx = kGrouping == Grouping::kMx1x32 || kGrouping == Grouping::kMx32x32;
  static constexpr int kBlock = kMx ? 32 : 128;
  static constexpr int kBlocks = kTile / kBlock;  // along one side of the tile
  static constexpr float kLargest = fp8_max(kFormat);

  struct Shared {
    ByteTile tile;
    // Groups along columns: the amax of each warp (16 rows) and column, then the multiplier of each
    // block and column. Square blocks: the amax of each warp, for MX of each column block too.
    float amax[kWarps][kTile];
  };

  const QuantizeParams& p;
  TilePosition at;
  int64_t first_row, first_column;
  Chunk<T> x[4];

  __device__ explicit Quantizer(const QuantizeParams& params)
      : p(params),
        at(TilePosition::of_thread()),
        first_row(blockIdx.y * int64_t{kTile}),
        first_column(blockIdx.x * int64_t{kTile}) {}

  __device__ void load() {
    const T* from = static_cast<const T*>(p.x);
    const int64_t column = first_column + at.column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first_row + at.row + i;
      const int64_t valid = row < p.rows ? p.cols - column : 0;
      x[i].load(from + row * p.cols + column, valid, p.vector_x && valid >= kChunk);
    }
  }

  __device__ float amax_of_row(int i) const {
    float amax = 0;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      amax = fmaxf(amax, fabsf(x[i][j]));  // fmaxf leaves NaN out
    }
    return amax;
  }

  __device__ BlockScale scale_128(float amax) const {
    return block_scale(amax, kLargest, p.power_of_two, p.amax_epsilon, p.largest_input);
  }

  __device__ void store_row(int i, const uint4& codes) const {
    const int64_t row = first_row + at.row + i, column = first_column + at.column;
    if (row < p.rows && column < p.cols) {
      store_bytes(p.row_codes + row * p.cols + column, codes, p.cols - column,
                  p.vector_rows && column + kChunk <= p.cols);
    }
  }

  // -- groups along rows

  __device__ void rows_1x128() const {
    float amax[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      amax[i] = max_over(max_over(max_over(amax_of_row(i), 1), 2), 4);
    }
    // Lanes 0 … 3 of the 8 make one scale each: a division costs as much as ten elements.
    const int lane = threadIdx.x % 8, mine = lane % 4;
    const float my_amax = mine == 0 ? amax[0] : mine == 1 ? amax[1] : mine == 2 ? amax[2] : amax[3];
    const BlockScale scale = scale_128(my_amax);
    const int64_t row = first_row + at.row + mine;
    if (lane < 4 && row < p.row_stride) {
      static_cast<float*>(p.row_scales)[blockIdx.x * p.row_stride + row] =
          row < p.rows ? scale.scale : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float multiplier = __shfl_sync(kAllLanes, scale.multiplier, i, 8);
      store_row(i, encode_row<T, kFormat>(x[i], multiplier));
    }
  }

  __device__ void rows_1x32() const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t code = mx_scale_code(max_over(amax_of_row(i), 1), kLargest);
      const int64_t row = first_row + at.row + i, column = first_column + at.column;
      if (threadIdx.x % 2 == 0 && row < p.rows && column < p.cols) {
        static_cast<uint8_t*>(p.row_scales)[row * p.row_stride + column / 32] = code;
      }
      store_row(i, encode_row<T, kFormat>(x[i], mx_multiplier(code)));
    }
  }

  // -- groups along columns

  /// Multipliers of all column groups into shared.amax[block][column]; their scales to memory.
  __device__ void scale_columns(Shared& shared) const {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      float amax =
          fmaxf(fmaxf(fabsf(x[0][j]), fabsf(x[1][j])), fmaxf(fabsf(x[2][j]), fabsf(x[3][j])));
      // All four NaN: left out, as a group without values.
      amax = fmaxf(amax, 0.0f);
      amax = max_over(max_over(amax, 8), 16);
      if (threadIdx.x % 32 < 8) {
        shared.amax[warp][at.column + j] = amax;
      }
    }
    __syncthreads();
    float multipliers[(kBlocks * kTile + kTileThreads - 1) / kTileThreads];
#pragma unroll
    for (int n = 0; n * kTileThreads < kBlocks * kTile; ++n) {
      const int task = n * kTileThreads + threadIdx.x, block = task / kTile, c = task % kTile;
      if (block >= kBlocks) {
        break;
      }
      constexpr int kWarpsPerBlock = kWarps / kBlocks;
      float amax = 0;
#pragma unroll
      for (int w = 0; w < kWarpsPerBlock; ++w) {
        amax = fmaxf(amax, shared.amax[block * kWarpsPerBlock + w][c]);
      }
      const int64_t column = first_column + c;
      const int64_t group = blockIdx.y * int64_t{kBlocks} + block;
      if constexpr (kMx) {
        const uint8_t code = mx_scale_code(amax, kLargest);
        multipliers[n] = mx_multiplier(code);
        if (column < p.cols && group < p.col_stride) {
          static_cast<uint8_t*>(p.col_scales)[column * p.col_stride + group] = code;
        }
      } else {
        const BlockScale scale = scale_128(amax);
        multipliers[n] = scale.multiplier;
        if (column < p.col_stride) {
          static_cast<float*>(p.col_scales)[group * p.col_stride + column] =
              column < p.cols ? scale.scale : 1.0f;
        }
      }
    }
    __syncthreads();  // every amax has been read
#pragma unroll
    for (int n = 0; n * kTileThreads < kBlocks * kTile; ++n) {
      const int task = n * kTileThreads + threadIdx.x;
      if (task < kBlocks * kTile) {
        shared.amax[task / kTile][task % kTile] = multipliers[n];
      }
    }
    __syncthreads();
  }

  __device__ void columns(Shared& shared) const {
    scale_columns(shared);
    const float* multipliers = shared.amax[at.row / kBlock] + at.column;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const float m = multipliers[j];
      shared.tile.put(at.row, at.column + j,
                      encode_four<kFormat>(x[0][j] * m, x[1][j] * m, x[2][j] * m, x[3][j] * m));
    }
    __syncthreads();
    shared.tile.write_transposed(p.col_codes, p.rows, p.cols, first_row, first_column,
                                 p.vector_columns);
  }

  // -- square blocks: one multiplier, one set of codes for both copies

  __device__ float scale_square_128(float (&amax)[kWarps][kTile], float mine) const {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      mine = max_over(mine, mask);
    }
    if (threadIdx.x % 32 == 0) {
      amax[0][threadIdx.x / 32] = mine;
    }
    __syncthreads();
    float all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      all = fmaxf(all, amax[0][w]);
    }
    const BlockScale scale = scale_128(all);
    const int64_t row = blockIdx.y, col = blockIdx.x;
    const int t = threadIdx.x;
    if (p.row_codes) {
      float* to = static_cast<float*>(p.row_scales) + row * p.row_stride + col;
      if (t == 0) {
        to[0] = scale.scale;
      } else if (t < 4 && col == gridDim.x - 1 && col + t < p.row_stride) {
        to[t] = 1.0f;
      }
    }
    if (p.col_codes) {
      float* to = static_cast<float*>(p.col_scales) + col * p.col_stride + row;
      if (t == 0) {
        to[0] = scale.scale;
      } else if (t < 4 && row == gridDim.y - 1 && row + t < p.col_stride) {
        to[t] = 1.0f;
      }
    }
    return scale.multiplier;
  }

  __device__ float scale_square_32(float (&amax)[kWarps][kTile], float mine) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column_block = lane % 8 / 2;
    mine = max_over(max_over(max_over(mine, 1), 8), 16);  // 16 rows × 32 columns
    if (lane < 8 && lane % 2 == 0) {
      amax[warp][column_block] = mine;
    }
    __syncthreads();
    const float all = fmaxf(amax[warp][column_block], amax[warp ^ 1][column_block]);
    const uint8_t code = mx_scale_code(all, kLargest);
    const int64_t row = blockIdx.y * int64_t{4} + warp / 2;
    const int64_t col = blockIdx.x * int64_t{4} + column_block;
    if (warp % 2 == 0 && lane < 8 && lane % 2 == 0 && row * 32 < p.rows && col * 32 < p.cols) {
      if (p.row_codes) {
        static_cast<uint8_t*>(p.row_scales)[row * p.row_stride + col] = code;
      }
      if (p.col_codes) {
        static_cast<uint8_t*>(p.col_scales)[col * p.col_stride + row] = code;
      }
    }
    return mx_multiplier(code);
  }

  __device__ void squares(float (&amax)[kWarps][kTile], ByteTile* tile) const {
    const float mine =
        fmaxf(fmaxf(amax_of_row(0), amax_of_row(1)), fmaxf(amax_of_row(2), amax_of_row(3)));
    float multiplier;
    if constexpr (kMx) {
      multiplier = scale_square_32(amax, mine);
    } else {
      multiplier = scale_square_128(amax, mine);
    }
    uint4 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i] = encode_row<T, kFormat>(x[i], multiplier);
      if (p.row_codes) {
        store_row(i, codes[i]);
      }
    }
    if constexpr (kColumnwise) {
      tile->put_rows(at, codes);
      __syncthreads();
      tile->write_transposed(p.col_codes, p.rows, p.cols, first_row, first_column,
                             p.vector_columns);
    }
  }
};

template <Grouping kGrouping, Fp8Format kFormat, typename T, bool kColumnwise>
__global__ void __launch_bounds__(kTileThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
#if __CUDA_ARCH__ >= 900
  // A kernel that asks to run beside this one may start (fp8/rebuild.h); all others still wait.
  if constexpr (kGrouping == Grouping::k1x128) {
    asm volatile("griddepcontrol.launch_dependents;");
  }
#endif
  if (p.skip && *p.skip == 1.0f) {
    return;
  }
  using Q = Quantizer<kGrouping, kFormat, T, kColumnwise>;
  Q quantizer(p);
  quantizer.load();
  if constexpr (kGrouping == Grouping::k128x128 || kGrouping == Grouping::kMx32x32) {
    if constexpr (kColumnwise) {
      __shared__ typename Q::Shared shared;
      quantizer.squares(shared.amax, &shared.tile);
    } else {
      __shared__ float amax[kWarps][kTile];
      quantizer.squares(amax, nullptr);
    }
  } else {
    if (!kColumnwise || p.row_codes) {
      if constexpr (kGrouping == Grouping::k1x128) {
        quantizer.rows_1x128();
      } else {
        quantizer.rows_1x32();
      }
    }
    if constexpr (kColumnwise) {
      __shared__ typename Q::Shared shared;
      quantizer.columns(shared);
    }
  }
}

template <Grouping kGrouping, Fp8Format kFormat, typename T>
void launch(const QuantizeParams& p, Stream& stream) {
  const dim3 grid(ceil_div(p.cols, kTile), ceil_div(p.rows, kTile));
  const auto kernel = p.col_codes ? quantize_kernel<kGrouping, kFormat, T, true>
                                  : quantize_kernel<kGrouping, kFormat, T, false>;
  kernel<<<grid, kTileThreads, 0, native(stream)>>>(p);
  CUDA_CHECK_LAUNCH("quantize");
}

}  // namespace quantize_detail

/// All formats and inputs of one grouping; each grouping is compiled in a file of its own.
template <Grouping kGrouping>
void quantize_grouping(const QuantizeParams& p, Fp8Format format, DType x, Stream& stream) {
  const auto with_format = [&](auto input) {
    using T = decltype(input);
    if (format == Fp8Format::kE4M3) {
      quantize_detail::launch<kGrouping, Fp8Format::kE4M3, T>(p, stream);
    } else {
      quantize_detail::launch<kGrouping, Fp8Format::kE5M2, T>(p, stream);
    }
  };
  switch (x) {
    case DType::kF32:
      return with_format(float{});
    case DType::kBF16:
      return with_format(bf16{});
    default:
      return with_format(f16{});
  }
}

void quantize_1x128(const QuantizeParams& p, Fp8Format format, DType x, Stream& stream);
void quantize_128x128(const QuantizeParams& p, Fp8Format format, DType x, Stream& stream);
void quantize_mx_1x32(const QuantizeParams& p, Fp8Format format, DType x, Stream& stream);
void quantize_mx_32x32(const QuantizeParams& p, Fp8Format format, DType x, Stream& stream);

}  // namespace rowshard::cuda
