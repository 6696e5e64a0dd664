#include "fp8/gemm_1d2d.h"

#include "fp8/gemm_1d2d.cuh"
#include "fp8/tensor_map.h"

namespace rowshard::cuda {
namespace {

template <typename Tile, typename Out>
void launch(const Gemm1d2d& g, int multiprocessors, cudaStream_t stream) {
  constexpr auto* kKernel = &gemm_1d2d_kernel<Tile, Out>;
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
  p.w_stride = static_cast<int>(round_up(ceil_div(g.k, kBlockK), 4));
  p.order = TileOrder(g.m, g.n, Tile::kRows, Tile::kCols);
  const CUtensorMap x_map = codes_map(g.x, g.m, g.k, Tile::kRows);
  const CUtensorMap w_map = codes_map(g.w, g.n, g.k, Tile::kCols);
  // An f32 result is written without TMA; any map will do.
  const CUtensorMap y_map = sizeof(Out) == 2 ? bf16_map(g.y, g.m, g.n) : x_map;
  kKernel<<<p.order.blocks(multiprocessors), kGemm1d2dThreads, Tile::kSharedBytes, stream>>>(
      x_map, w_map, y_map, p);
  CUDA_CHECK_LAUNCH("gemm_1d2d");
}

template <typename Tile>
void launch(const Gemm1d2d& g, int multiprocessors, cudaStream_t stream) {
  g.y_is_f32 ? launch<Tile, float>(g, multiprocessors, stream)
             : launch<Tile, __nv_bfloat16>(g, multiprocessors, stream);
}

}  // namespace

void gemm_1d2d(const Gemm1d2d& g, int multiprocessors, void* stream, int tile) {
  if (g.m == 0 || g.n == 0) {
    return;
  }
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (tile < 0 ? choose_gemm_1d2d_tile(g.m, g.n, g.k, multiprocessors) : tile) {
    case 0:
      return launch<Gemm1d2dTile<256, 128, 3>>(g, multiprocessors, queue);
    case 1:
      return launch<Gemm1d2dTile<128, 128, 5>>(g, multiprocessors, queue);
    case 2:
      return launch<Gemm1d2dTile<128, 192, 4>>(g, multiprocessors, queue);
    case 3:
      return launch<Gemm1d2dTile<64, 128, 8>>(g, multiprocessors, queue);
    default:
      return launch<Gemm1d2dTile<64, 64, 12>>(g, multiprocessors, queue);
  }
}

}  // namespace rowshard::cuda
