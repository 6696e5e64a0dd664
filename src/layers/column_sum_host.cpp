#include <vector>

#include "layers/column_sum.h"
#include "layers/dispatch.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void add_column_sums(const View& result, const View& parts, const ConstView& x, Stream& stream);
}
#endif

namespace host {

void add_column_sums(const View& result, const View&, const ConstView& x, Stream&) {
  for_host_type(x.dtype, "add_column_sums", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    const int64_t width = x.dim(1);
    std::vector<A> total(width, 0);
    for (int64_t row = 0; row < x.dim(0); ++row) {
      const T* from = x.as<T>() + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i)
        total[i] += widen(from[i]);
    }
    A* out = result.as<A>();
    for (int64_t i = 0; i < width; ++i)
      out[i] += total[i];
  });
}

}  // namespace host

Tensor column_parts(int64_t columns, DType dtype, Context& ctx) {
  return ctx.arena.tensor(Category::kWorkspace, "column_sum.parts", dtype, {kColumnParts, columns});
}

void add_column_sums(const View& result, const ConstView& x, Context& ctx) {
  check_operands(
      is_float_dtype(x.dtype) && x.shape.rank() == 2 && result.shape == Shape{x.dim(1)} &&
          result.device == x.device && result.dtype == accumulator_dtype(x.dtype),
      "add_column_sums", "x [T, N], result [N] f32 (f64 for f64)", {{"result", result}, {"x", x}});
  if (x.elements() == 0)
    return;
  const Tensor parts = column_parts(x.dim(1), result.dtype, ctx);
  ROWSHARD_DISPATCH(x.device, add_column_sums(result, parts, x, ctx.stream));
}

}  // namespace rowshard
