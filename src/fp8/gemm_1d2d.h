// Our own block-scaled product for sm_90: y [M, N] = x [M, K] · w [N, K]ᵀ, x scaled 1×128, w
// 128×128, both e4m3, y bf16 or f32. For the sources of this room and for bench/; fp8_gemm is the
// public product and picks between this and cuBLASLt. Results are cuBLASLt's, bit for bit.
//
// Any M; N and K in multiples of 16; every operand 16-byte aligned. No scratch, no state: safe to
// capture and to call from any thread. The kernel is in gemm_1d2d.cuh.
#pragma once

#include <cstdint>

namespace rowshard::cuda {

struct Gemm1d2d {
  const void* x = nullptr;          // [M, K] e4m3
  const float* x_scales = nullptr;  // [⌈K/128⌉, R4(M)]
  const void* w = nullptr;          // [N, K] e4m3; transpose_w: [K, N]
  const float* w_scales = nullptr;  // [⌈N/128⌉, R4(⌈K/128⌉)]; transpose_w: [⌈K/128⌉, R4(⌈N/128⌉)]
  bool transpose_w = false;    // y = x · w: the dgrad product on a rowwise copy
  void* y = nullptr;           // [M, N]
  bool y_is_f32 = false;       // else bf16
  const void* bias = nullptr;  // [N] bf16, or null
  float beta = 0;
  int64_t m = 0, n = 0, k = 0;
};

/// Rows and columns of y that one tile covers.
struct TileShape {
  int rows, cols;
};
inline constexpr TileShape kGemm1d2dTiles[] = {
    {256, 128}, {128, 128}, {128, 192}, {64, 128}, {64, 64}};
inline constexpr int kGemm1d2dTileCount = sizeof(kGemm1d2dTiles) / sizeof(TileShape);

/// A stage of a transposed w is turned as a square of 128 × 128 codes.
constexpr bool gemm_1d2d_has(int tile, bool transpose_w) {
  return !transpose_w || kGemm1d2dTiles[tile].cols == 128;
}
/// The tile, as an index, that is expected to be fastest on that many multiprocessors.
int choose_gemm_1d2d_tile(int64_t m, int64_t n, int64_t k, int multiprocessors,
                          bool transpose_w = false);

/// Queued on `stream` (a cudaStream_t). `multiprocessors` bounds the grid, to leave some to other
/// work. `tile` for the bench and tests: an index, or -1 to choose.
void gemm_1d2d(const Gemm1d2d& product, int multiprocessors, void* stream, int tile = -1);

}  // namespace rowshard::cuda
