#include <algorithm>

#include "core/error.h"
#include "fp8/rebuild.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void rebuild_columnwise(const Fp8View& columnwise, const ConstFp8View& rowwise, Stream& stream,
                        RebuildStart start);
}
#endif

namespace host {
namespace {

void transpose(uint8_t* to, const uint8_t* from, int64_t rows, int64_t cols) {
  constexpr int64_t kTile = 64;  // both tiles stay in the first cache level
#pragma omp parallel for collapse(2) if (rows * cols > 65536)
  for (int64_t row = 0; row < rows; row += kTile) {
    for (int64_t col = 0; col < cols; col += kTile) {
      const int64_t row_end = std::min(row + kTile, rows), col_end = std::min(col + kTile, cols);
      for (int64_t c = col; c < col_end; ++c) {
        for (int64_t r = row; r < row_end; ++r) {
          to[c * rows + r] = from[r * cols + c];
        }
      }
    }
  }
}

void rebuild_columnwise(const Fp8View& columnwise, const ConstFp8View& rowwise, Stream&,
                        RebuildStart) {
  const int64_t rows = rowwise.outer(), cols = rowwise.inner();
  transpose(static_cast<uint8_t*>(columnwise.codes.data),
            static_cast<const uint8_t*>(rowwise.codes.data), rows, cols);
  const Shape blocks = compact_scale_shape(rowwise.grouping, rows, cols);
  if (is_mx(rowwise.grouping)) {
    transpose(static_cast<uint8_t*>(columnwise.scales.data),
              static_cast<const uint8_t*>(rowwise.scales.data), blocks[0], blocks[1]);
    return;
  }
  // Only the valid rectangle moves; the padding lies along another dimension in the result.
  float* to = columnwise.scales.as<float>();
  const float* from = rowwise.scales.as<float>();
  const int64_t to_stride = columnwise.scales.dim(1), from_stride = rowwise.scales.dim(1);
  for (int64_t r = 0; r < columnwise.scales.dim(0); ++r) {
    for (int64_t c = 0; c < to_stride; ++c) {
      to[r * to_stride + c] = c < blocks[0] ? from[c * from_stride + r] : 1.0f;
    }
  }
}

}  // namespace
}  // namespace host

void rebuild_columnwise(const Fp8View& columnwise, const ConstFp8View& rowwise, Stream& stream,
                        RebuildStart start) {
  check(rowwise, "rebuild_columnwise: the copy read");
  check(columnwise, "rebuild_columnwise: the copy written");
  ROWSHARD_CHECK(columnwise.grouping == rowwise.grouping && rebuildable(rowwise.grouping),
                 ShapeError, "rebuild_columnwise needs square blocks (128x128, mx 32x32); got ",
                 describe(rowwise),
                 ". Groups of one row differ between the copies: quantise the high-precision "
                 "values again");
  ROWSHARD_CHECK(columnwise.outer() == rowwise.inner() && columnwise.inner() == rowwise.outer() &&
                     columnwise.codes.dtype == rowwise.codes.dtype &&
                     columnwise.codes.device == rowwise.codes.device &&
                     stream.device() == rowwise.codes.device,
                 ShapeError, "rebuild_columnwise from ", describe(rowwise), " to ",
                 describe(columnwise), " on a stream of ", stream.device());
  if (rowwise.codes.elements() == 0) {
    return;
  }
  ROWSHARD_DISPATCH(stream.device(), rebuild_columnwise(columnwise, rowwise, stream, start));
}

}  // namespace rowshard
