// Where the scale of an element lies in the GEMM layout, for code of both devices.
#pragma once

#include "fp8/fp8_view.h"

namespace rowshard {

/// Read access to the scales of one copy; trivially copyable, so a kernel takes it by value.
struct ScaleGrid {
  const void* data = nullptr;
  Grouping grouping = Grouping::k128x128;
  int64_t stride = 0;  // elements between rows of the scale matrix

  ScaleGrid() = default;
  ScaleGrid(const ConstView& scales, Grouping grouping_)
      : data(scales.data), grouping(grouping_), stride(scales.cols()) {}
  explicit ScaleGrid(const ConstFp8View& view) : ScaleGrid(view.scales, view.grouping) {}

  /// Index of the scale of element (outer, any inner of this block).
  ROWSHARD_HD int64_t index(int64_t outer, int64_t inner_block_index) const {
    switch (grouping) {
      case Grouping::k1x128:
        return inner_block_index * stride + outer;
      case Grouping::k128x128:
        return outer / 128 * stride + inner_block_index;
      case Grouping::kMx1x32:
        return outer * stride + inner_block_index;
      default:
        return outer / 32 * stride + inner_block_index;
    }
  }
  ROWSHARD_HD float at(int64_t outer, int64_t inner_block_index) const {
    const int64_t i = index(outer, inner_block_index);
    return is_mx_grid() ? decode_e8m0(static_cast<const uint8_t*>(data)[i])
                        : static_cast<const float*>(data)[i];
  }

 private:
  ROWSHARD_HD bool is_mx_grid() const {
    return grouping == Grouping::kMx1x32 || grouping == Grouping::kMx32x32;
  }
};

}  // namespace rowshard
