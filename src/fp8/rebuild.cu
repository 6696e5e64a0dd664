#include "core/cuda_check.h"
#include "fp8/byte_tile.cuh"
#include "fp8/rebuild.h"

namespace rowshard::cuda {
namespace {

struct RebuildParams {
  const uint8_t* codes;  // [rows, cols]
  uint8_t* transposed;   // [cols, rows]
  const void* scales;
  void* transposed_scales;
  int64_t rows, cols;
  int64_t scale_stride, transposed_stride;  // f32 scales: row lengths with padding
  bool vector_rows, vector_columns;         // 16-byte accesses fit
};

// One thread block moves one tile and the scales that belong to it, padding included.
__device__ void move_scale_128(const RebuildParams& p) {
  const auto* from = static_cast<const float*>(p.scales);
  auto* to = static_cast<float*>(p.transposed_scales);
  const int64_t row = blockIdx.y, col = blockIdx.x;
  if (threadIdx.x == 0) {
    to[col * p.transposed_stride + row] = from[row * p.scale_stride + col];
  }
  if (row == gridDim.y - 1 && row + 1 + threadIdx.x < p.transposed_stride) {
    to[col * p.transposed_stride + row + 1 + threadIdx.x] = 1.0f;
  }
}
__device__ void move_scales_32(const RebuildParams& p) {
  const auto* from = static_cast<const uint8_t*>(p.scales);
  auto* to = static_cast<uint8_t*>(p.transposed_scales);
  if (threadIdx.x < 16) {
    const int64_t row = blockIdx.y * int64_t{4} + threadIdx.x % 4;
    const int64_t col = blockIdx.x * int64_t{4} + threadIdx.x / 4;
    if (row < p.transposed_stride && col < p.scale_stride) {
      to[col * p.transposed_stride + row] = from[row * p.scale_stride + col];
    }
  }
}

/// The bytes of a tile that is whole are read once: they make room in L2 for what is written, which
/// the next product reads.
__device__ uint4 load_once(const uint8_t* from, int64_t valid, bool vector) {
  return vector ? __ldcs(reinterpret_cast<const uint4*>(from)) : load_bytes(from, valid, false);
}

// Eight blocks a multiprocessor: a 4096×4096 weight is one wave.
template <bool kMx>
__global__ void __launch_bounds__(kTileThreads, 8) rebuild_kernel(const RebuildParams p) {
  __shared__ ByteTile tile;
  const int64_t first_row = blockIdx.y * int64_t{kTile}, first_column = blockIdx.x * int64_t{kTile};
  const TilePosition at = TilePosition::of_thread();
  const int64_t column = first_column + at.column;
  uint4 rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = first_row + at.row + i;
    const int64_t valid = row < p.rows ? p.cols - column : 0;
    rows[i] = load_once(p.codes + row * p.cols + column, valid, p.vector_rows && valid >= 16);
  }
  if constexpr (kMx) {
    move_scales_32(p);
  } else {
    move_scale_128(p);
  }
  tile.put_rows(at, rows);
  __syncthreads();
  tile.write_transposed(p.transposed, p.rows, p.cols, first_row, first_column, p.vector_columns);
#if __CUDA_ARCH__ >= 900
  // Started beside the kernel before it (kBesideQuantizer), this one is done when that one is.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace

void rebuild_columnwise(const Fp8View& columnwise, const ConstFp8View& rowwise, Stream& stream,
                        RebuildStart start) {
  RebuildParams p;
  p.codes = static_cast<const uint8_t*>(rowwise.codes.data);
  p.transposed = static_cast<uint8_t*>(columnwise.codes.data);
  p.scales = rowwise.scales.data;
  p.transposed_scales = columnwise.scales.data;
  p.rows = rowwise.outer();
  p.cols = rowwise.inner();
  p.scale_stride = rowwise.scales.dim(1);
  p.transposed_stride = columnwise.scales.dim(1);
  p.vector_rows = p.cols % 16 == 0 && aligned16(p.codes);
  p.vector_columns = p.rows % 16 == 0 && aligned16(p.transposed);
  const dim3 grid(ceil_div(p.cols, kTile), ceil_div(p.rows, kTile));
  cudaLaunchAttribute beside{};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kTileThreads);
  config.stream = native(stream);
  config.attrs = &beside;
  config.numAttrs = start == RebuildStart::kBesideQuantizer ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(
      &config, is_mx(rowwise.grouping) ? rebuild_kernel<true> : rebuild_kernel<false>, p));
  CUDA_CHECK_LAUNCH("rebuild_columnwise");
}

}  // namespace rowshard::cuda
