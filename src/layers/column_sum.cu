#include "layers/column_sum.cuh"
#include "layers/dispatch.h"

namespace rowshard::cuda {
namespace {

template <typename T>
struct Element {
  const T* x;
  int64_t width;
  __device__ float operator()(int64_t row, int64_t column) const {
    return widen(x[row * width + column]);
  }
};

}  // namespace

void add_column_sums(const View& result, const View& parts, const ConstView& x, Stream& stream) {
  for_cuda_type(x.dtype, "add_column_sums", [&](auto type) {
    using T = decltype(type);
    sum_columns(result, parts, x.dim(0), Element<T>{x.as<T>(), x.dim(1)}, stream);
  });
  CUDA_CHECK_LAUNCH("add_column_sums");
}

}  // namespace rowshard::cuda
