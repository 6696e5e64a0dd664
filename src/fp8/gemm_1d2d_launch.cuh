// Starts gemm_1d2d_kernel. One source file for w stored as [N, K], one for [K, N], so that they
// compile side by side.
#pragma once

#include "fp8/gemm_1d2d.cuh"
#include "fp8/tensor_map.h"

namespace rowshard::cuda {

template <typename Tile, typename Out, bool kTransposeW>
void launch_gemm_1d2d(const Gemm1d2d& g, int multiprocessors, cudaStream_t stream) {
  constexpr auto* kKernel = &gemm_1d2d_kernel<Tile, Out, kTransposeW>;
  allow_shared_memory<kKernel>(Tile::kSharedBytes);
  Gemm1d2dArguments p{};
  p.x_scales = g.x_scales;
  p.w_scales = g.w_scales;
  p.y = g.y;
  p.bias = static_cast<const __nv_bfloat16*>(g.bias);
  p.beta = g.beta;
  p.m = static_cast<int>(g.m);
  p.n = static_cast<int>(g.n);
  p.k = static_cast<int>(g.k);
  p.x_stride = static_cast<int>(round_up(g.m, 4));
  p.w_stride = static_cast<int>(round_up(ceil_div(kTransposeW ? g.n : g.k, kBlockK), 4));
  p.order = TileOrder(g.m, g.n, Tile::kRows, Tile::kCols);
  const CUtensorMap x_map = codes_map(g.x, g.m, g.k, Tile::kRows);
  const CUtensorMap w_map =
      kTransposeW ? codes_map(g.w, g.k, g.n, kBlockK) : codes_map(g.w, g.n, g.k, Tile::kCols);
  // An f32 result is written without TMA; any map will do.
  const CUtensorMap y_map = sizeof(Out) == 2 ? bf16_map(g.y, g.m, g.n) : x_map;
  // The kernel may start while the one before it ends; it waits before it reads or writes what that
  // one may touch.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.order.blocks(multiprocessors));
  config.blockDim = dim3(kGemm1d2dThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, x_map, w_map, y_map, p));
  CUDA_CHECK_LAUNCH("gemm_1d2d");
}

/// `tile`: an index of kGemm1d2dTiles that gemm_1d2d_has.
template <bool kTransposeW>
void launch_gemm_1d2d(const Gemm1d2d& g, int tile, int multiprocessors, cudaStream_t stream) {
  const auto with = [&]<typename Tile>(Tile) {
    if constexpr (gemm_1d2d_has(Tile::kIndex, kTransposeW)) {
      g.y_is_f32 ? launch_gemm_1d2d<Tile, float, kTransposeW>(g, multiprocessors, stream)
                 : launch_gemm_1d2d<Tile, __nv_bfloat16, kTransposeW>(g, multiprocessors, stream);
    }
  };
  switch (tile) {
    case 0:
      return with(Gemm1d2dTile<0, 3>());
    case 1:
      return with(Gemm1d2dTile<1, 5>());
    case 2:
      return with(Gemm1d2dTile<2, 4>());
    case 3:
      return with(Gemm1d2dTile<3, 8>());
    default:
      return with(Gemm1d2dTile<4, 12>());
  }
}

void gemm_1d2d_transposed(const Gemm1d2d& g, int tile, int multiprocessors, cudaStream_t stream);

}  // namespace rowshard::cuda
