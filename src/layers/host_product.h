// The small matrix products of the host attention: C += A · B on blocks of a few dozen rows, in the
// calling thread.
//
// BLAS is for the large products of a layer; here its own threads would fight with ours, and a call
// costs as much as the block. C is computed in tiles that stay in registers.
#pragma once

#include <cstdint>
#include <cstring>

namespace rowshard::host {

/// 32 bytes of T as one value; the compiler maps it to whatever vectors the machine has.
template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(32)));
  static constexpr int kLanes = 32 / sizeof(T);
};

/// A matrix read through two strides, so that a transpose is only another order of strides.
template <typename T>
struct Strided {
  const T* data;
  int64_t row;
  int64_t col;

  Strided transposed() const { return {data, col, row}; }
};

namespace detail {

/// C[kRows, 2 vectors] += A[kRows, depth] · B[depth, 2 vectors].
template <int kRows, typename T>
inline void product_tile(T* c, int64_t ldc, const Strided<T>& a, const T* b, int64_t ldb,
                         int64_t depth) {
  using Vector = typename VectorOf<T>::Type;
  constexpr int kLanes = VectorOf<T>::kLanes;
  Vector sum[kRows][2];
  for (int i = 0; i < kRows; ++i) {
    std::memcpy(sum[i], c + i * ldc, sizeof sum[i]);
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector left, right;
    std::memcpy(&left, b + k * ldb, sizeof left);
    std::memcpy(&right, b + k * ldb + kLanes, sizeof right);
    for (int i = 0; i < kRows; ++i) {
      const T factor = a.data[i * a.row + k * a.col];
      sum[i][0] += factor * left;
      sum[i][1] += factor * right;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    std::memcpy(c + i * ldc, sum[i], sizeof sum[i]);
  }
}

}  // namespace detail

/// C[rows, cols] += A[rows, depth] · B[depth, cols]; the rows of B and C are contiguous. Every
/// element is summed over k in order.
template <typename T>
void add_product(T* c, int64_t ldc, const Strided<T>& a, const T* b, int64_t ldb, int64_t rows,
                 int64_t cols, int64_t depth) {
  constexpr int kRows = 6;
  constexpr int kCols = 2 * VectorOf<T>::kLanes;
  int64_t j = 0;
  for (; j + kCols <= cols; j += kCols) {
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows) {
      const Strided<T> part{a.data + i * a.row, a.row, a.col};
      detail::product_tile<kRows>(c + i * ldc + j, ldc, part, b + j, ldb, depth);
    }
    for (; i < rows; ++i) {
      const Strided<T> part{a.data + i * a.row, a.row, a.col};
      detail::product_tile<1>(c + i * ldc + j, ldc, part, b + j, ldb, depth);
    }
  }
  if (j == cols)
    return;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < depth; ++k) {
      const T factor = a.data[i * a.row + k * a.col];
      for (int64_t r = j; r < cols; ++r)
        c[i * ldc + r] += factor * b[k * ldb + r];
    }
  }
}

}  // namespace rowshard::host
