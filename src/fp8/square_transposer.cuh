// 128 × 128 codes, transposed where they lie in shared memory.
//
// The tensor cores take 8-bit operands from shared memory only with the contraction contiguous. A
// weight [K, N] whose rows run along N is therefore turned, 128 × 128 codes at once, after TMA
// brought them: byte (k, n) moves to (n, k), both in rows of 128 bytes with the 128B swizzle. They
// are an 8 × 8 board of squares, 16 rows × one chunk of 16 bytes each:
//
//            chunk b of rows 16a … 16a + 15   ──▶   chunk a of rows 16b … 16b + 15
//
// One instruction moves two squares, a = 2i and 2i + 1, of one difference d = a ^ b. They change
// places with those of i ^ ⌊d / 2⌋: two instructions are a unit that needs no others, and sixteen
// units make the board, shared out among three warps.
//
// Within a square, ldmatrix moves pairs of bytes: matrix of eight rows k, transposed, gives lane
// 4q + t the pairs (n = 2q, 2q + 1) of rows k = 2t, 2t + 1. Two such matrices hold four rows k for
// each lane, and two byte picks make of them four k in a row for n = 2q and for n = 2q + 1: rows of
// what stmatrix writes. Which eight of the sixteen rows make a matrix is free, and chosen so that
// its rows lie in eight different chunks of the swizzle, in both directions: no bank conflicts.
#pragma once

#include "fp8/ptx.cuh"

namespace rowshard::cuda {

class SquareTransposer {
 public:
  __device__ __forceinline__ explicit SquareTransposer(int lane) {
    const int row = lane % 8, pair = row / 2, second = lane / 8 % 2, square = lane / 16;
    // Rows k of the matrices: 0 1 4 5 10 11 14 15, and 2 3 6 7 8 9 12 13.
    const int k = 4 * pair + row % 2 + ((pair >= 2) != (second == 1) ? 2 : 0);
    // Rows n: 0 2 4 6 9 11 13 15, and 1 3 5 7 8 10 12 14.
    const int n = 2 * row + ((row >= 4) != (second == 1) ? 1 : 0);
    from_ = square * kSquareRows + (k * 128 | (k % 8 ^ square) * 16);
    to_ = square * kSquareRows + (n * 128 | (n % 8 ^ square) * 16);
    picks_ = (lane % 4 < 2 ? 0x6420 : 0x2064) ^ (lane < 16 ? 0 : kOther);
  }
  static constexpr int kWarps = 3;

  /// The share of warp `which` of kWarps; `codes` are 1024-byte aligned.
  __device__ __forceinline__ void turn(uint32_t codes, int which) const {
    if (which == 0) {
      turn<0>(codes);
    } else if (which == 1) {
      turn<1>(codes);
    } else {
      turn<2>(codes);
    }
  }

 private:
  static constexpr uint32_t kSquareRows = 16 * 128;  // bytes
  static constexpr int kUnits = 16;
  static constexpr uint32_t kOther = 0x1111;  // from the picks of even bytes to those of odd ones

  /// Of a unit: its d, and i of its instruction `half`.
  static constexpr int difference(int unit) { return unit / 2; }
  static constexpr int pair(int unit, int half) {
    const int e = unit / 4, first = e <= 1 ? unit % 2 * 2 : unit % 2;
    return half ? first ^ (e ? e : 1) : first;
  }

  template <int kFirst>
  __device__ __forceinline__ void turn(uint32_t codes) const {
    // Left alone, the compiler makes all addresses of all units first, and has no registers left.
    uint32_t from = codes + from_, to = codes + to_, to_odd = codes + (to_ ^ kSquareRows);
#pragma unroll
    for (int unit = kFirst; unit < kUnits; unit += kWarps) {
      const int d = difference(unit);
      ptx::pin(from);
      ptx::pin(d % 2 ? to_odd : to);
      uint32_t v[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows of a, chunk a ^ d
        const int i = pair(unit, half);
        ptx::ldmatrix_transposed(v[half], (from ^ (2 * i ^ d) * 16) + i * 2 * kSquareRows);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows of a ^ d, chunk a
        const int i = pair(unit, half);
        const uint32_t(&x)[4] = v[half];
        ptx::stmatrix(
            ((d % 2 ? to_odd : to) ^ i * 32) + (2 * i ^ (d & 6)) * kSquareRows,
            ptx::pick_bytes(x[0], x[1], picks_), ptx::pick_bytes(x[0], x[1], picks_ ^ kOther),
            ptx::pick_bytes(x[2], x[3], picks_), ptx::pick_bytes(x[2], x[3], picks_ ^ kOther));
      }
    }
  }

  uint32_t from_, to_, picks_;
};

}  // namespace rowshard::cuda
