// A softmax row put together from its parts; for the sources of this room only.
#pragma once

#include <cmath>

#include "core/dtype.h"

namespace rowshard {

struct SoftmaxTotals {
  double maximum, total, target;
};

/// statistics [parts, 3, rows] f64 (layers/cross_entropy.h), summed in the order of the parts.
ROWSHARD_HD inline SoftmaxTotals combine_statistics(const double* statistics, int parts,
                                                    int64_t rows, int64_t row) {
  SoftmaxTotals all{-INFINITY, 0, 0};
  for (int part = 0; part < parts; ++part)
    all.maximum = fmax(all.maximum, statistics[part * 3 * rows + row]);
  for (int part = 0; part < parts; ++part) {
    const double* of = statistics + part * 3 * rows + row;
    all.total += of[rows] * exp(of[0] - all.maximum);
    all.target += of[2 * rows];
  }
  return all;
}

}  // namespace rowshard
