// y [M, N] = x [M, K] · w [N, K]ᵀ on sm_90a, e4m3; x scaled 1×128, w 128×128; f32 sums.
// Or y = x · w with w stored as [K, N] (kTransposeW): the dgrad product dx = dy · w on the rowwise
// copy of a weight, without a columnwise one.
//
// What is computed, and in this order (cuBLASLt's, so results are equal bit for bit):
//   for each block of 128 k, ascending:  p = tensor-core sum of the codes' products over the block
//                                        sum = fma(p, x_scale · w_scale, sum)
//   y = round(sum + bias), and for beta != 0  y = round(y + beta · old y)
//
// One block of threads on each multiprocessor walks over tiles of y; three warpgroups, two roles:
//
//   warpgroup 0  warp 0      one thread fetches stages by TMA, up to kStages ahead, across tiles
//                warps 1–3   with kTransposeW turn each stage of w where it lies
//   warpgroups 1, 2          multiply one stage, scale, add; at the end of a tile write it out
//
//            128 k of w, kCols rows                  stage s: full[s] ─▶ (turn ─▶ turned[s]) ─▶
//           ┌───────────────────┐                             multiply ─▶ empty[s]
//           │ ░ stage (128B rows│, swizzled by TMA)
//           └───────────────────┘
//   128 k   ┌───────────────────┐
//   of x    │ wave 0  [64,kCols]│ ┐ warpgroup 1     kWaves = kRows / 128 waves of 64 rows share
//   kRows   │ wave 1            │ ┘                 one set of raw products (kCols / 2 registers);
//   rows    ├───────────────────┤                   each has its own sums (kCols / 2 a wave)
//           │ wave 0            │ ┐ warpgroup 2
//           │ wave 1            │ ┘                 kRows = 64: the warpgroups split columns
//           └───────────────────┘
//
// While one warpgroup scales and adds, the other's products run on the tensor cores.
//
// Edges: TMA reads zeros beyond M, N and K and does not write there. Rows beyond M see scales of
// whatever lies in shared memory; their results go nowhere. A column group beyond N reads the last
// row of w's scales.
#pragma once

#include "fp8/gemm_1d2d.h"
#include "fp8/ptx.cuh"
#include "fp8/square_transposer.cuh"
#include "fp8/tile_order.cuh"

namespace rowshard::cuda {

inline constexpr int kBlockK =
    128;  // codes of one scale block along k, and the bytes of a stage row

struct Gemm1d2dArguments {
  const float* x_scales;      // [⌈K/128⌉, x_stride]
  const float* w_scales;      // [⌈N/128⌉, w_stride]; kTransposeW: [⌈K/128⌉, w_stride]
  void* y;                    // [M, N] bf16 or f32
  const __nv_bfloat16* bias;  // [N] or null
  float beta;
  int m, n, k;
  int x_stride, w_stride;
  TileOrder order;
};

/// A tile of kGemm1d2dTiles. 64 rows: both warpgroups work on the same rows and split the columns.
template <int kIndex_, int kStages_>
struct Gemm1d2dTile {
  static constexpr int kIndex = kIndex_, kStages = kStages_;
  static constexpr int kRows = kGemm1d2dTiles[kIndex].rows, kCols = kGemm1d2dTiles[kIndex].cols;
  static constexpr bool kSplitCols = kRows == 64;
  static constexpr int kWaves = kSplitCols ? 1 : kRows / 128;
  static constexpr int kWaveCols = kSplitCols ? kCols / 2 : kCols;  // columns of a warpgroup
  static constexpr int kSums = kWaveCols / 2;  // registers of 64 × kWaveCols in a warpgroup
  // Columns that surely share a row of w's scales.
  static constexpr int kSegment = kWaveCols % 128 == 0 ? 128 : kWaveCols % 64 == 0 ? 64 : 32;
  static constexpr int kSegments = kWaveCols / kSegment;

  // Shared memory: stages of x then w, the tile of y as boxes of [64, 64] bf16, scales, barriers.
  static constexpr int kXBytes = kRows * kBlockK, kWBytes = kCols * kBlockK;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kBoxBytes = 64 * 64 * 2;
  static constexpr int kYOffset = kStages * kStageBytes;
  static constexpr int kScaleOffset = kYOffset + kRows * kCols * 2;
  // A stage's scales: of x, and with kTransposeW four of w's, one of which is the tile's.
  static constexpr int kScaleBytes = kRows * 4 + 16;
  static constexpr int kBarrierOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr int kSharedBytes = kBarrierOffset + 3 * kStages * 8;

  static_assert(kRows == 64 || kRows == 128 || kRows == 256);
  static_assert(kCols % 64 == 0 && kSharedBytes <= 227 * 1024);
};

inline constexpr int kGemm1d2dThreads = 384;

/// Bias, and beta · old y, for two neighbours of a row. A bf16 result is rounded before beta · y is
/// added.
template <typename Out>
__device__ __forceinline__ float2 with_bias_and_beta(float2 sum, const Gemm1d2dArguments& p,
                                                     int row, int col) {
  if (row >= p.m || col >= p.n) {
    return sum;
  }
  if (p.bias) {
    const float2 bias = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.bias + col));
    sum = {sum.x + bias.x, sum.y + bias.y};
  }
  if (p.beta == 0) {
    return sum;
  }
  return plus_beta(sum, p.beta,
                   static_cast<const Out*>(p.y) + static_cast<int64_t>(row) * p.n + col);
}

template <typename Tile, typename Out, bool kTransposeW>
__global__ void __launch_bounds__(kGemm1d2dThreads, 1)
    gemm_1d2d_kernel(const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap w_map,
                     const __grid_constant__ CUtensorMap y_map, const Gemm1d2dArguments p) {
#if ROWSHARD_HOPPER
  static_assert(!kTransposeW || (Tile::kCols == 128 && Tile::kSegments == 1));
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  const uint32_t full = shared + Tile::kBarrierOffset, empty = full + Tile::kStages * 8;
  const uint32_t turned = empty + Tile::kStages * 8;
  const uint32_t ready = kTransposeW ? turned : full;  // what the multiplying warps wait for
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int blocks = (p.k + kBlockK - 1) / kBlockK;

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) {
      __trap();  // the swizzle and the descriptors count on it
    }
    for (int s = 0; s < Tile::kStages; ++s) {
      ptx::barrier_init(full + s * 8, 1);   // the loader, and its bytes
      ptx::barrier_init(empty + s * 8, 8);  // one lane of each multiplying warp
      ptx::barrier_init(turned + s * 8, SquareTransposer::kWarps);
    }
    ptx::barrier_init_done();
  }
  __syncthreads();
  ptx::start_kernel_behind();

  if (warp < 4) {
    ptx::lower_registers<40>();
    if (warp == 0 && lane == 0) {
      ptx::prefetch_map(&x_map);
      ptx::prefetch_map(&w_map);
      ptx::wait_for_kernel_before();
      int s = 0;
      uint32_t parity = 1;
      for (int tile = blockIdx.x; tile < p.order.count(); tile += gridDim.x) {
        const int2 place = p.order.place(tile);
        const int row = place.x * Tile::kRows, col = place.y * Tile::kCols;
        const uint32_t scale_bytes = min(Tile::kRows, p.x_stride - row) * 4;
        const float* scales = p.x_scales + row;
        const uint32_t w_scale_bytes = kTransposeW ? 16 : 0;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          ptx::barrier_wait(empty + s * 8, parity);
          const uint32_t barrier = full + s * 8, stage = shared + s * Tile::kStageBytes;
          const uint32_t to_scales = shared + Tile::kScaleOffset + s * Tile::kScaleBytes;
          ptx::barrier_expect(barrier, Tile::kStageBytes + scale_bytes + w_scale_bytes);
          ptx::tma_load(stage, &x_map, block * kBlockK, row, barrier);
          ptx::bulk_load(to_scales, scales, scale_bytes, barrier);
          if constexpr (kTransposeW) {
            ptx::bulk_load(to_scales + Tile::kRows * 4,
                           p.w_scales + static_cast<int64_t>(block) * p.w_stride + col / 512 * 4,
                           w_scale_bytes, barrier);
          }
          ptx::tma_load(stage + Tile::kXBytes, &w_map, kTransposeW ? col : block * kBlockK,
                        kTransposeW ? block * kBlockK : col, barrier);
          scales += p.x_stride;
          if (++s == Tile::kStages) {
            s = 0;
            parity ^= 1;
          }
        }
      }
    } else if (kTransposeW && warp > 0) {
      const SquareTransposer transposer(lane);
      int s = 0;
      uint32_t parity = 0;
      for (int tile = blockIdx.x; tile < p.order.count(); tile += ptx::read_grid()) {
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          ptx::barrier_wait(full + s * 8, parity);
          transposer.turn(shared + s * Tile::kStageBytes + Tile::kXBytes, warp - 1);
          ptx::fence_async_shared();
          __syncwarp();
          if (lane == 0) {
            ptx::barrier_arrive(turned + s * 8);
          }
          if (++s == Tile::kStages) {
            s = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    ptx::raise_registers<232>();
    const int group = warp / 4 - 1;  // 0 or 1
    const int first_row = Tile::kSplitCols ? 0 : group * Tile::kWaves * 64;
    const int first_col = Tile::kSplitCols ? group * Tile::kWaveCols : 0;
    const int my_row = first_row + warp % 4 * 16 + lane / 4;  // and the one eight below, in wave 0
    int s = 0;
    uint32_t parity = 0;
    ptx::wait_for_kernel_before();
    for (int tile = blockIdx.x; tile < p.order.count(); tile += gridDim.x) {
      const int2 place = p.order.place(tile);
      const int tile_row = place.x * Tile::kRows, tile_col = place.y * Tile::kCols;

      // Stored along k, w's scales are read a block ahead; else they come with the stage.
      const float* w_scales[Tile::kSegments];
      float next_scale[Tile::kSegments];
      if constexpr (!kTransposeW) {
#pragma unroll
        for (int i = 0; i < Tile::kSegments; ++i) {
          const int row = min(tile_col + first_col + i * Tile::kSegment, p.n - 1) / 128;
          w_scales[i] = p.w_scales + static_cast<int64_t>(row) * p.w_stride;
          next_scale[i] = __ldg(w_scales[i]);
        }
      }
      const uint32_t w_scale_at = Tile::kRows * 4 + tile_col / 128 % 4 * 4;
      float sums[Tile::kWaves][Tile::kSums];
#pragma unroll
      for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
        for (int i = 0; i < Tile::kSums; ++i) {
          sums[wave][i] = 0;
        }
      }

      // Unrolled, the next stage's barrier is polled and its addresses are made while this stage's
      // sums are added: 4 to 5 % of the whole kernel.
#pragma unroll 4
      for (int block = 0; block < blocks; ++block) {
        float w_scale[Tile::kSegments];
        if constexpr (!kTransposeW) {
          const int next = min(block + 1, blocks - 1);
#pragma unroll
          for (int i = 0; i < Tile::kSegments; ++i) {
            w_scale[i] = next_scale[i];
            next_scale[i] = __ldg(w_scales[i] + next);
          }
        }
        const uint32_t stage = shared + s * Tile::kStageBytes;
        const uint32_t stage_scales = shared + Tile::kScaleOffset + s * Tile::kScaleBytes;
        const uint32_t scales = stage_scales + my_row * 4;
        const uint64_t x_codes = ptx::matrix_descriptor(stage + first_row * kBlockK);
        const uint64_t w_codes =
            ptx::matrix_descriptor(stage + Tile::kXBytes + first_col * kBlockK);
        ptx::barrier_wait(ready + s * 8, parity);
        if constexpr (kTransposeW) {
          w_scale[0] = ptx::load_shared(stage_scales + w_scale_at);
        }
#pragma unroll
        for (int wave = 0; wave < Tile::kWaves; ++wave) {
          const float x0 = ptx::load_shared(scales + wave * 256);
          const float x1 = ptx::load_shared(scales + wave * 256 + 32);
          float products[Tile::kSums];
          ptx::wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            ptx::wgmma(products, x_codes + (wave * 64 * kBlockK + step * 32) / 16,
                       w_codes + step * 32 / 16, step > 0);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          ptx::hold(products);
          if (wave == Tile::kWaves - 1 && lane == 0) {
            ptx::barrier_arrive(empty + s * 8);
          }
#pragma unroll
          for (int i = 0; i < Tile::kSegments; ++i) {
            const float s0 = x0 * w_scale[i], s1 = x1 * w_scale[i];
#pragma unroll
            for (int q = 0; q < Tile::kSegment / 8; ++q) {
              const int j = i * Tile::kSegment / 2 + q * 4;
              float* sum = sums[wave] + j;
              sum[0] = fmaf(products[j], s0, sum[0]);
              sum[1] = fmaf(products[j + 1], s0, sum[1]);
              sum[2] = fmaf(products[j + 2], s1, sum[2]);
              sum[3] = fmaf(products[j + 3], s1, sum[3]);
            }
          }
        }
        if (++s == Tile::kStages) {
          s = 0;
          parity ^= 1;
        }
      }

      const int my_col = tile_col + first_col + lane % 4 * 2;
      if (p.bias || p.beta != 0) {
#pragma unroll
        for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
          for (int j = 0; j < Tile::kSums; j += 2) {
            const int row = tile_row + my_row + wave * 64 + (j % 4 ? 8 : 0);
            const float2 value = with_bias_and_beta<Out>({sums[wave][j], sums[wave][j + 1]}, p, row,
                                                         my_col + j / 4 * 8);
            sums[wave][j] = value.x;
            sums[wave][j + 1] = value.y;
          }
        }
      }
      if constexpr (sizeof(Out) == 4) {
        // Four lanes write the 32 bytes of a sector.
#pragma unroll
        for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
          for (int j = 0; j < Tile::kSums; j += 2) {
            const int row = tile_row + my_row + wave * 64 + (j % 4 ? 8 : 0);
            const int col = my_col + j / 4 * 8;
            if (row < p.m && col < p.n) {
              *reinterpret_cast<float2*>(static_cast<float*>(p.y) +
                                         static_cast<int64_t>(row) * p.n +
                                         col) = {sums[wave][j], sums[wave][j + 1]};
            }
          }
        }
      } else {
        // Through shared memory, in boxes of 64 rows and 64 columns. Warpgroups that share a box
        // wait for each other.
        constexpr bool kShared = Tile::kWaveCols < 64;
        const uint32_t barrier = kShared ? 1 : 1 + group, threads = kShared ? 256 : 128;
        const bool writer = warp % 4 == 0 && lane == 0 && (!kShared || group == 0);
        if (writer) {
          ptx::tma_store_wait_read<0>();  // of the tile before
        }
        ptx::named_barrier(barrier, threads);
        constexpr int kBoxes = Tile::kCols / 64;  // along the columns
        // Lane l names row l % 8 of matrix l / 8; matrices: rows 0 and 8, then columns 0 and 8.
        const int box_row = warp % 4 * 16 + lane % 16, half = lane / 16;
#pragma unroll
        for (int wave = 0; wave < Tile::kWaves; ++wave) {
          const uint32_t boxes =
              shared + Tile::kYOffset + (first_row / 64 + wave) * kBoxes * Tile::kBoxBytes;
#pragma unroll
          for (int j = 0; j < Tile::kSums; j += 8) {  // 16 columns
            const float* sum = sums[wave] + j;
            const int in_tile = first_col + j * 2;
            const int chunk = in_tile % 64 / 8 + half;
            ptx::stmatrix(boxes + in_tile / 64 * Tile::kBoxBytes + box_row * 128 +
                              ((chunk ^ (box_row % 8)) * 16),
                          pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                          pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
          }
        }
        ptx::fence_async_shared();
        ptx::named_barrier(barrier, threads);
        if (writer) {
#pragma unroll
          for (int wave = 0; wave < Tile::kWaves; ++wave) {
            constexpr int kMine = kShared ? kBoxes : Tile::kWaveCols / 64;
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
              const int box = first_col / 64 + i, row = tile_row + first_row + wave * 64;
              if (row < p.m && tile_col + box * 64 < p.n) {
                ptx::tma_store(&y_map,
                               shared + Tile::kYOffset +
                                   ((first_row / 64 + wave) * kBoxes + box) * Tile::kBoxBytes,
                               tile_col + box * 64, row);
              }
            }
          }
          ptx::tma_store_commit();
        }
      }
    }
    if (sizeof(Out) == 2 && lane == 0 && warp % 4 == 0) {
      ptx::tma_store_wait();
    }
  }
#endif
}

}  // namespace rowshard::cuda
