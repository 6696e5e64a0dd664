// Where the elements of x lie in the dropout mask of the whole; for the sources of this room only.
#pragma once

#include "layers/lora.h"

namespace rowshard {

/// `count` runs of `length` neighbouring elements of x. Run i begins at element first + i · stride
/// of the mask, and touches at most `groups` groups of four, the ones that one call of the
/// generator gives. An x of all features is one run.
struct MaskRuns {
  int64_t first, stride, length, count, groups;

  MaskRuns(const ConstView& x, const Dropout& dropout) {
    const int64_t cols = x.dim(1);
    const bool whole = dropout.columns == 0 || dropout.columns == cols;
    stride = whole ? cols : dropout.columns;
    first = dropout.first_token * stride + dropout.first_column;
    length = whole ? x.elements() : cols;
    count = whole ? 1 : x.dim(0);
    groups = whole ? ceil_div(first + length, 4) - first / 4 : ceil_div(length, 4) + 1;
  }
};

}  // namespace rowshard
