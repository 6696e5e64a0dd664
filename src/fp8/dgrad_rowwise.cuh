// dx [M, K] = dy [M, N] · w [N, K] on sm_90a from the rowwise codes of w, e4m3; dy scaled 1×128
// along N, w 128×128; f32 sums.
//
// The product contracts over N, along which the rowwise w is strided, and the tensor cores take
// 8-bit operands from shared memory only with the contraction contiguous. But one operand may come
// from registers, in any order a thread can make. So the tile is computed transposed,
//
//     dxᵀ [128 k, tokens] = wᵀ (from registers) · dyᵀ (from shared memory, contiguous along n)
//
// and wᵀ is made on the way from shared memory to registers (read_transposed below).
//
// What is computed, and in this order (that of cuBLASLt and of gemm_1d2d on the columnwise copy, so
// results are equal bit for bit):
//   for each block of 128 n, ascending:  p = tensor-core sum of the codes' products over the block
//                                        sum = fma(p, dy_scale · w_scale, sum)
//   dx = round(sum), and for beta != 0  dx = round(dx + beta · old dx)
//
// One block of threads on each multiprocessor walks over tiles of dx; three warpgroups:
//
//   warpgroup 0  warp 0      one thread fetches stages by TMA: dy [kTokens, 128 n], w [128 n, 128
//   k]
//                warps 1, 2  the products of scales of 128 tokens each, in the order of fragments
//   warpgroups 1, 2          128 k × half of the tokens each, as two halves of 64 k:
//
//                    tokens of warpgroup 1   │  of warpgroup 2
//            64 k ┌────────────────────────┬─┴──────────────────────┐   each half: read wᵀ of 64 k,
//          half 0 │ sums[0]                │ sums[0]                │   multiply (kGroup tokens at
//            64 k ├────────────────────────┼────────────────────────┤   once), scale, add
//          half 1 │ sums[1]                │ sums[1]                │
//                 └────────────────────────┴────────────────────────┘
//
// A scale belongs to a column of the transposed tile, so a thread needs kGroup / 4 of them a stage;
// both halves use the ones it has read. Half of them are read twice, for want of registers.
#pragma once

#include "fp8/ptx.cuh"
#include "fp8/tile_order.cuh"

namespace rowshard::cuda {

struct DgradRowwiseArguments {
  const float* dy_scales;  // [⌈N/128⌉, dy_stride]
  const float* w_scales;   // [⌈N/128⌉, w_stride]
  void* dx;                // [M, K] bf16 or f32
  float beta;
  int m, n, k;
  int dy_stride, w_stride;
  TileOrder order;
};

/// kTokens × 128 k of dx a tile.
template <int kTokens_, int kStages_>
struct DgradRowwiseTile {
  static constexpr int kTokens = kTokens_, kStages = kStages_;
  static constexpr int kGroup = kTokens / 2;  // tokens of a warpgroup
  static constexpr int kSums = kGroup / 2;    // registers of 64 k × kGroup in a warpgroup
  static constexpr int kQuads = kGroup / 16;  // four scales each
  static constexpr int kKept = kQuads < 4 ? kQuads : 4;
  static constexpr int kScaleWarps = kTokens / 128;

  static constexpr int kDyBytes = kTokens * 128, kWBytes = 128 * 128;
  static constexpr int kStageBytes = kDyBytes + kWBytes;
  static constexpr int kBoxBytes = 64 * 64 * 2;
  static constexpr int kDxOffset = kStages * kStageBytes;
  static constexpr int kScaleOffset = kDxOffset + kTokens * 128 * 2;
  // One slot of scales more than stages: a warp's first lane may give a stage back while others
  // still read its scales, but not while they read those of the stage before.
  static constexpr int kScaleSlots = kStages + 1;
  static constexpr int kBarrierOffset = kScaleOffset + kScaleSlots * kTokens * 4;
  static constexpr int kSharedBytes = kBarrierOffset + 2 * kStages * 8;

  static_assert((kTokens == 128 || kTokens == 256) && kSharedBytes <= 227 * 1024);
};

inline constexpr int kDgradRowwiseThreads = 384;

/// wᵀ as the register operand: 16 k of this warp (one chunk of 16 bytes in each row of the stage),
/// 32 n. ldmatrix moves pairs of bytes, so a pair (k = 2q, 2q + 1) of row n arrives in lane
/// q · 4 + t; four byte picks part the pairs. Row q of the fragment is k = 2q, row q + 8 is 2q + 1.
///
/// `lane_address` names the row that this lane gives to ldmatrix. Which of the eight rows of a
/// matrix is which n is free: the order below makes the codes come out with n ascending, and the
/// exchange of two matrices for lanes t >= 2 makes the eight rows of each lie in different chunks
/// of the swizzle, free of bank conflicts.
struct TransposedRead {
  uint32_t row_offset, even, odd;

  __device__ __forceinline__ TransposedRead(int warp_in_group, int lane) {
    const int row = lane % 8, pair = row / 2, matrix = lane / 8;
    const int n =
        4 * pair + row % 2 + ((pair >= 2) != (matrix % 2 == 1) ? 2 : 0) + (matrix >= 2 ? 16 : 0);
    row_offset = n * 128 + ((warp_in_group ^ (n % 8)) * 16);
    even = lane % 4 < 2 ? 0x6420 : 0x2064;
    odd = lane % 4 < 2 ? 0x7531 : 0x3175;
    ptx::pin(row_offset);
    ptx::pin(even);
    ptx::pin(odd);
  }
  /// Chunk 4 · half + warp of the 32 rows that start at `rows`.
  __device__ __forceinline__ void operator()(uint32_t (&a)[4], uint32_t rows, int half) const {
    uint32_t v[4];
    ptx::ldmatrix_transposed(v, rows + (row_offset ^ (half * 64)));
    a[0] = ptx::pick_bytes(v[0], v[1], even);
    a[1] = ptx::pick_bytes(v[0], v[1], odd);
    a[2] = ptx::pick_bytes(v[2], v[3], even);
    a[3] = ptx::pick_bytes(v[2], v[3], odd);
  }
};

/// sums += products · scales over 16 tokens: column groups j and j + 1 of 8. The scales come as
/// tokens 1, 0, 9, 8: registers of even number hold the products of even tokens, and an addition
/// whose three operands lie in one bank of registers takes longer. Those with a common scale follow
/// each other, so that it is fetched once.
__device__ __forceinline__ void add_scaled(float* sums, const float* products, const float4& s) {
  sums[0] = fmaf(products[0], s.y, sums[0]);
  sums[2] = fmaf(products[2], s.y, sums[2]);
  sums[1] = fmaf(products[1], s.x, sums[1]);
  sums[3] = fmaf(products[3], s.x, sums[3]);
  sums[4] = fmaf(products[4], s.w, sums[4]);
  sums[6] = fmaf(products[6], s.w, sums[6]);
  sums[5] = fmaf(products[5], s.z, sums[5]);
  sums[7] = fmaf(products[7], s.z, sums[7]);
}

template <typename Tile, typename Out>
__global__ void __launch_bounds__(kDgradRowwiseThreads, 1)
    dgrad_rowwise_kernel(const __grid_constant__ CUtensorMap dy_map,
                         const __grid_constant__ CUtensorMap w_map,
                         const __grid_constant__ CUtensorMap dx_map,
                         const DgradRowwiseArguments p) {
#if ROWSHARD_HOPPER
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  const uint32_t full = shared + Tile::kBarrierOffset, empty = full + Tile::kStages * 8;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int tiles = p.order.count(), blocks = (p.n + 127) / 128;

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) {
      __trap();  // the swizzle and the descriptors count on it
    }
    for (int s = 0; s < Tile::kStages; ++s) {
      ptx::barrier_init(full + s * 8, 1 + Tile::kScaleWarps);  // the loader and its bytes; scales
      ptx::barrier_init(empty + s * 8, 8);                     // one lane of each multiplying warp
    }
    ptx::barrier_init_done();
  }
  __syncthreads();

  if (warp < 4) {
    ptx::lower_registers<24>();
    int s = 0;
    uint32_t parity = 1;
    if (warp == 0 && ptx::read_lane() == 0) {
      ptx::prefetch_map(&dy_map);
      ptx::prefetch_map(&w_map);
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int2 place = p.order.place(tile);
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          ptx::barrier_wait(empty + s * 8, parity);
          const uint32_t barrier = full + s * 8, stage = shared + s * Tile::kStageBytes;
          ptx::barrier_expect(barrier, Tile::kStageBytes);
          ptx::tma_load(stage, &dy_map, block * 128, place.x * Tile::kTokens, barrier);
          ptx::tma_load(stage + Tile::kDyBytes, &w_map, place.y * 128, block * 128, barrier);
          if (++s == Tile::kStages) {
            s = 0;
            parity ^= 1;
          }
        }
      }
    } else if (warp >= 1 && warp <= Tile::kScaleWarps) {
      int slot = 0;
      // Lane 4i + t: the four tokens of the i-th 16 that lanes t of a multiplying warp hold. Read
      // one block ahead.
      for (int tile = blockIdx.x; tile < tiles; tile += ptx::read_grid()) {
        const int2 place = p.order.place(tile);
        const int lane = ptx::read_lane();
        const int token = place.x * Tile::kTokens + (warp - 1) * 128 + lane / 4 * 16 + lane % 4 * 2;
        const uint32_t to = shared + Tile::kScaleOffset + ((warp - 1) * 128 + lane * 4) * 4;
        const bool low = token < p.dy_stride, high = token + 8 < p.dy_stride;
        int dy_at = token, w_at = place.y;
        float2 a{}, b{};
        float w = 0;
        const auto read = [&] {
          if (low) {
            a = __ldg(reinterpret_cast<const float2*>(p.dy_scales + dy_at));
          }
          if (high) {
            b = __ldg(reinterpret_cast<const float2*>(p.dy_scales + dy_at + 8));
          }
          w = __ldg(p.w_scales + w_at);
          dy_at += p.dy_stride;
          w_at += p.w_stride;
        };
        read();
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          ptx::barrier_wait(empty + s * 8, parity);
          ptx::store_shared4(to + slot * Tile::kTokens * 4, {a.y * w, a.x * w, b.y * w, b.x * w});
          if (block + 1 < blocks) {
            read();
          }
          __syncwarp();
          if (lane == 0) {
            ptx::barrier_arrive(full + s * 8);
          }
          slot = slot == Tile::kStages ? 0 : slot + 1;
          if (++s == Tile::kStages) {
            s = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    ptx::raise_registers<240>();
    const int group = warp / 4 - 1;  // 0 or 1
    const int lane = ptx::read_lane();
    const TransposedRead read_transposed(warp % 4, lane);
    uint32_t my_scales = shared + Tile::kScaleOffset + (group * Tile::kGroup + lane % 4 * 4) * 4;
    ptx::pin(my_scales);
    const bool first_lane = lane == 0;
    int s = 0, slot = 0;
    uint32_t parity = 0;
    uint32_t a[4][4];  // wᵀ of the half that is multiplied next
    const auto read_half = [&](uint32_t stage, int half) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        read_transposed(a[step], stage + Tile::kDyBytes + step * 32 * 128, half);
      }
    };
    ptx::barrier_wait(full, 0);
    read_half(shared, 0);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sums[2][Tile::kSums];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < Tile::kSums; ++i) {
          sums[half][i] = 0;
        }
      }
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
        const uint32_t stage = shared + s * Tile::kStageBytes, release = empty + s * 8;
        const uint32_t scales = my_scales + slot * Tile::kTokens * 4;
        slot = slot == Tile::kStages ? 0 : slot + 1;
        const uint64_t dy_codes = ptx::matrix_descriptor(stage + group * Tile::kGroup * 128);
        float4 kept[Tile::kKept];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float products[Tile::kSums];
          ptx::wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            ptx::wgmma(products, a[step], dy_codes + step * 32 / 16, step > 0);
          }
          ptx::wgmma_commit();
          if (half == 0) {
#pragma unroll
            for (int i = 0; i < Tile::kKept; ++i) {
              kept[i] = ptx::load_shared4(scales + i * 64);
            }
          }
          if (half == 1) {
            // The next stage, of this tile or the next one, should be there by now.
            if (++s == Tile::kStages) {
              s = 0;
              parity ^= 1;
            }
            if (block + 1 < blocks || tile + gridDim.x < tiles) {
              ptx::barrier_wait(full + s * 8, parity);
            }
          }
          ptx::wgmma_wait<0>();
          ptx::hold(products);
          float4 rest[Tile::kQuads - Tile::kKept + 1];
#pragma unroll
          for (int i = Tile::kKept; i < Tile::kQuads; ++i) {
            rest[i - Tile::kKept] = ptx::load_shared4(scales + i * 64);
          }
          if (half == 1 && first_lane) {
            ptx::barrier_arrive(release);
          }
          // The next half of w is read while this one's sums are added. Behind the last stage of
          // all, nobody uses what this reads.
          read_half(half == 0 ? stage : shared + s * Tile::kStageBytes, 1 - half);
#pragma unroll
          for (int i = 0; i < Tile::kKept; ++i) {
            add_scaled(sums[half] + i * 8, products + i * 8, kept[i]);
          }
#pragma unroll
          for (int i = Tile::kKept; i < Tile::kQuads; ++i) {
            add_scaled(sums[half] + i * 8, products + i * 8, rest[i - Tile::kKept]);
          }
        }
      }

      // sums[half][4j + 2c + e] is token 8j + 2 (lane % 4) + e, k 2 (lane / 4) + c of the
      // warp's 16.
      const int lane = ptx::read_lane();  // not kept through the loop above
      const int2 place = p.order.place(tile);
      const int first_token = place.x * Tile::kTokens + group * Tile::kGroup;
      const int my_token = first_token + lane % 4 * 2;
      const int my_k = place.y * 128 + warp % 4 * 16 + lane / 4 * 2;
      Out* const mine = static_cast<Out*>(p.dx) + static_cast<int64_t>(my_token) * p.k + my_k;
      const auto each_pair = [&](auto&& body) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < Tile::kSums / 2; ++i) {
            const int from_mine = i / 2 * 8 + i % 2;
            float& low = sums[half][i / 2 * 4 + i % 2];
            float& high = sums[half][i / 2 * 4 + i % 2 + 2];
            body(low, high, my_token + from_mine < p.m && my_k + half * 64 < p.k,
                 mine + static_cast<int64_t>(from_mine) * p.k + half * 64);
          }
        }
      };
      if (p.beta != 0) {
        each_pair([&](float& low, float& high, bool inside, Out* at) {
          if (inside) {
            const float2 value = plus_beta<Out>({low, high}, p.beta, at);
            low = value.x;
            high = value.y;
          }
        });
      }
      if constexpr (sizeof(Out) == 4) {
        each_pair([&](float& low, float& high, bool inside, Out* at) {
          if (inside) {
            *reinterpret_cast<float2*>(at) = {low, high};
          }
        });
      } else {
        // Through shared memory, in boxes of 64 tokens and 64 k.
        constexpr int kBoxes = Tile::kGroup / 64;  // of a warpgroup along the tokens
        const uint32_t boxes = shared + Tile::kDxOffset + group * kBoxes * 2 * Tile::kBoxBytes;
        const bool writer = warp % 4 == 0 && lane == 0;
        if (writer) {
          ptx::tma_store_wait_read<0>();  // of the tile before
        }
        ptx::named_barrier(1 + group, 128);
        const int chunk = warp % 4 * 2 + lane / 16, in_chunk = lane / 4 % 4 * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < Tile::kSums / 2; ++i) {
            const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            const float* sum = sums[half] + i / 2 * 4 + i % 2;
            ptx::store_shared(boxes + (i / 16 * 2 + half) * Tile::kBoxBytes + token % 64 * 128 +
                                  (chunk ^ (token % 8)) * 16 + in_chunk,
                              pack_bf16(sum[0], sum[2]));
          }
        }
        ptx::fence_async_shared();
        ptx::named_barrier(1 + group, 128);
        if (writer) {
#pragma unroll
          for (int i = 0; i < kBoxes * 2; ++i) {
            const int token = first_token + i / 2 * 64, k = place.y * 128 + i % 2 * 64;
            if (token < p.m && k < p.k) {
              ptx::tma_store(&dx_map, boxes + i * Tile::kBoxBytes, k, token);
            }
          }
          ptx::tma_store_commit();
        }
      }
    }
    if (sizeof(Out) == 2 && first_lane && warp % 4 == 0) {
      ptx::tma_store_wait();
    }
  }
#endif
}

}  // namespace rowshard::cuda
