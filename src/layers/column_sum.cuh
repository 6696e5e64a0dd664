// Two kernels of a sum over rows: parts of rows, then the parts in order (layers/column_sum.h).
#pragma once

#include "layers/column_sum.h"
#include "layers/kernel.cuh"

namespace rowshard::cuda {

/// parts[p, c] = Σ term(row, c) over rows p, p + kColumnParts, …
template <typename Term>
__global__ void column_parts_kernel(float* parts, Term term, int64_t rows, int64_t width) {
  const int64_t column = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (column >= width)
    return;
  float total = 0;
  for (int64_t row = blockIdx.y; row < rows; row += kColumnParts)
    total += term(row, column);
  parts[blockIdx.y * width + column] = total;
}

static __global__ void column_total_kernel(float* result, const float* parts, int64_t width) {
  const int64_t column = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (column >= width)
    return;
  float total = 0;
  for (int part = 0; part < kColumnParts; ++part)
    total += parts[part * width + column];
  result[column] += total;
}

template <typename Term>
void sum_columns(const View& result, const View& parts, int64_t rows, Term term, Stream& stream) {
  const int64_t width = result.elements();
  const auto blocks = static_cast<unsigned>(ceil_div(width, kThreads));
  column_parts_kernel<<<dim3(blocks, kColumnParts), kThreads, 0, native(stream)>>>(
      parts.as<float>(), term, rows, width);
  column_total_kernel<<<blocks, kThreads, 0, native(stream)>>>(result.as<float>(),
                                                               parts.as<float>(), width);
}

}  // namespace rowshard::cuda
