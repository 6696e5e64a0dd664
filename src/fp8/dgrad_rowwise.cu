#include "fp8/dgrad_rowwise.cuh"

#include "fp8/dgrad_rowwise.h"
#include "fp8/tensor_map.h"

namespace rowshard::cuda {
namespace {

template <typename Tile, typename Out>
void launch(const DgradRowwise& g, int multiprocessors, cudaStream_t stream) {
  constexpr auto* kKernel = &dgrad_rowwise_kernel<Tile, Out>;
  allow_shared_memory<kKernel>(Tile::kSharedBytes);
  DgradRowwiseArguments p{};
  p.dy_scales = g.dy_scales;
  p.w_scales = g.w_scales;
  p.dx = g.dx;
  p.beta = g.beta;
  p.m = static_cast<int>(g.m);
  p.n = static_cast<int>(g.n);
  p.k = static_cast<int>(g.k);
  p.dy_stride = static_cast<int>(round_up(g.m, 4));
  p.w_stride = static_cast<int>(round_up(ceil_div(g.k, 128), 4));
  p.order = TileOrder(g.m, g.k, Tile::kTokens, 128);
  const CUtensorMap dy_map = codes_map(g.dy, g.m, g.n, Tile::kTokens);
  const CUtensorMap w_map = codes_map(g.w, g.n, g.k, 128);
  // An f32 result is written without TMA; any map will do.
  const CUtensorMap dx_map = sizeof(Out) == 2 ? bf16_map(g.dx, g.m, g.k) : dy_map;
  kKernel<<<p.order.blocks(multiprocessors), kDgradRowwiseThreads, Tile::kSharedBytes, stream>>>(
      dy_map, w_map, dx_map, p);
  CUDA_CHECK_LAUNCH("dgrad_rowwise");
}

template <typename Tile>
void launch(const DgradRowwise& g, int multiprocessors, cudaStream_t stream) {
  g.dx_is_f32 ? launch<Tile, float>(g, multiprocessors, stream)
              : launch<Tile, __nv_bfloat16>(g, multiprocessors, stream);
}

/// Half the tile takes a little more than half the time, so it pays only when it saves a round.
int choose_tokens(const DgradRowwise& g, int multiprocessors) {
  const auto rounds = [&](int tokens) {
    return ceil_div(ceil_div(g.m, tokens) * ceil_div(g.k, 128), multiprocessors);
  };
  return 1.1 * static_cast<double>(rounds(128)) < 2.0 * static_cast<double>(rounds(256)) ? 128
                                                                                         : 256;
}

}  // namespace

void dgrad_rowwise(const DgradRowwise& g, int multiprocessors, void* stream, int tokens) {
  if (g.m == 0 || g.k == 0) {
    return;
  }
  const auto queue = static_cast<cudaStream_t>(stream);
  if ((tokens ? tokens : choose_tokens(g, multiprocessors)) == 128) {
    launch<DgradRowwiseTile<128, 5>>(g, multiprocessors, queue);
  } else {
    launch<DgradRowwiseTile<256, 3>>(g, multiprocessors, queue);
  }
}

void fp8_dgrad_rowwise(const View& dx, const ConstFp8View& dy, const ConstFp8View& w, float beta,
                       Context& ctx) {
  for (const void* pointer :
       {static_cast<const void*>(dx.data), dy.codes.data, dy.scales.data, w.codes.data}) {
    ROWSHARD_CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, ShapeError,
                   "fp8_dgrad_rowwise on cuda needs 16-byte aligned operands: dx ", describe(dx),
                   ", dy ", describe(dy), ", w ", describe(w));
  }
  DgradRowwise product;
  product.dy = dy.codes.data;
  product.dy_scales = dy.scales.as<float>();
  product.w = w.codes.data;
  product.w_scales = w.scales.as<float>();
  product.dx = dx.data;
  product.dx_is_f32 = dx.dtype == DType::kF32;
  product.beta = beta;
  product.m = dx.dim(0);
  product.n = w.outer();
  product.k = w.inner();
  dgrad_rowwise(product, multiprocessor_count(ctx.device()), ctx.stream.native());
}

}  // namespace rowshard::cuda
