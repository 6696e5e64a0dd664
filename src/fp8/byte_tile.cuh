// A 128×128 byte tile is transposed by 256 threads through 16 KiB of shared memory.
//
// A thread holds 4 rows × 16 columns: rows 4·(t/8) …, columns 16·(t%8) …. It turns each 4×4 patch
// into four words of 4 rows (one column each) in registers and stores whole words; columns are then
// read back and written out 16 bytes at a time.
//
// Word w of a column lies at w ^ 4·(column/16 % 8). A warp stores 8 different column/16 times 4
// consecutive words: 32 banks. It loads 16-byte groups of one column with 8 lanes: 32 banks.
#pragma once

#include "fp8/encode.cuh"

namespace rowshard::cuda {

constexpr int kTile = 128;
constexpr int kTileThreads = 256;

struct TilePosition {
  int row;     // first of 4
  int column;  // first of 16

  __device__ static TilePosition of_thread() {
    return {static_cast<int>(threadIdx.x) / 8 * 4, static_cast<int>(threadIdx.x) % 8 * 16};
  }
};

class ByteTile {
 public:
  /// The bytes of `column`, rows row … row + 3.
  __device__ void put(int row, int column, uint32_t four_rows) {
    words_[column * 32 + ((row / 4) ^ (column / 16 * 4))] = four_rows;
  }
  /// This thread's patch of 4 rows × 16 columns, transposed on the way.
  __device__ void put_rows(const TilePosition& at, const uint4 (&rows)[4]) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t a = word(rows[0], q), b = word(rows[1], q);
      const uint32_t c = word(rows[2], q), d = word(rows[3], q);
      const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
      const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
      put(at.row, at.column + 4 * q, __byte_perm(ab_low, cd_low, 0x5410));
      put(at.row, at.column + 4 * q + 1, __byte_perm(ab_low, cd_low, 0x7632));
      put(at.row, at.column + 4 * q + 2, __byte_perm(ab_high, cd_high, 0x5410));
      put(at.row, at.column + 4 * q + 3, __byte_perm(ab_high, cd_high, 0x7632));
    }
  }
  /// After __syncthreads: writes the tile as [columns, rows] into `to` [cols, rows].
  ///   first_row, first_column  where the tile begins in the matrix [rows, cols] it was read from
  __device__ void write_transposed(uint8_t* to, int64_t rows, int64_t cols, int64_t first_row,
                                   int64_t first_column, bool vector) const {
    const int group = threadIdx.x % 8;  // 16 rows
    const int64_t row = first_row + group * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = i * 32 + threadIdx.x / 8;
      const int64_t column = first_column + c;
      if (column < cols && row < rows) {
        const uint4 bytes = reinterpret_cast<const uint4*>(words_)[c * 8 + (group ^ (c / 16))];
        store_bytes(to + column * rows + row, bytes, rows - row, vector && row + 16 <= rows);
      }
    }
  }

 private:
  __device__ static uint32_t word(const uint4& bytes, int i) {
    return i == 0 ? bytes.x : i == 1 ? bytes.y : i == 2 ? bytes.z : bytes.w;
  }
  alignas(16) uint32_t words_[kTile * kTile / 4];
};

}  // namespace rowshard::cuda
