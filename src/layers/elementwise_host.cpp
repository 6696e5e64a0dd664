#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "layers/dispatch.h"
#include "layers/elementwise.h"
#include "layers/reduction.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void add(const View& c, const ConstView& a, const ConstView& b, Stream& stream);
void scale(const View& x, double factor, Stream& stream);
void broadcast_row(const View& y, const ConstView& row, Stream& stream);
void gather_rows(const View& y, const ConstView& x, const ConstView& rows, Stream& stream);
void scatter_add_rows(const View& x, const ConstView& y, const ConstView& rows, Stream& stream);
void reduce(const View& result, const ConstView& x, bool squares, bool accumulate, Context& ctx);
void count_nonfinite(const View& count, const ConstView& x, bool accumulate, Stream& stream);
}  // namespace cuda
#endif

namespace host {
namespace {

void check_rows(const ConstView& rows, int64_t limit, const char* operation) {
  const int32_t* row = rows.as<int32_t>();
  for (int64_t i = 0; i < rows.elements(); ++i) {
    ROWSHARD_CHECK(row[i] >= 0 && row[i] < limit, ShapeError, operation, ": row ", row[i],
                   " at place ", i, " is outside the ", limit, " rows there are");
  }
}

// One chunk in the order of layers/reduction.h.
template <typename Term>
double chunk_sum(int64_t count, Term term) {
  std::array<double, kReductionLanes> lanes{};
  for (int64_t i = 0; i < count; i += kReductionLanes) {
    const int64_t width = std::min<int64_t>(kReductionLanes, count - i);
    for (int64_t lane = 0; lane < width; ++lane)
      lanes[lane] += term(i + lane);
  }
  for (int64_t half = kReductionLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane)
      lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <typename T, bool kSquares>
double reduce_elements(const T* x, int64_t count) {
  const int64_t chunks = ceil_div(count, kReductionChunk);
  std::vector<double> partial(chunks);
#pragma omp parallel for if (count > kParallelElements)
  for (int64_t c = 0; c < chunks; ++c) {
    const T* from = x + c * kReductionChunk;
    const int64_t length = std::min<int64_t>(kReductionChunk, count - c * kReductionChunk);
    partial[c] = chunk_sum(length, [from](int64_t i) {
      const double value = static_cast<double>(widen(from[i]));
      return kSquares ? value * value : value;
    });
  }
  return chunk_sum(chunks, [&](int64_t i) { return partial[i]; });
}

}  // namespace

void add(const View& c, const ConstView& a, const ConstView& b, Stream&) {
  for_host_type(c.dtype, "add", [&](auto type) {
    using T = decltype(type);
    T* out = c.as<T>();
    const T* left = a.as<T>();
    const T* right = b.as<T>();
    const int64_t count = c.elements();
#pragma omp parallel for simd if (parallel : count > kParallelElements)
    for (int64_t i = 0; i < count; ++i)
      out[i] = narrow<T>(widen(left[i]) + widen(right[i]));
  });
}

void scale(const View& x, double factor, Stream&) {
  for_host_type(x.dtype, "scale", [&](auto type) {
    using T = decltype(type);
    T* values = x.as<T>();
    const auto f = static_cast<Accumulator<T>>(factor);
    const int64_t count = x.elements();
#pragma omp parallel for simd if (parallel : count > kParallelElements)
    for (int64_t i = 0; i < count; ++i)
      values[i] = narrow<T>(widen(values[i]) * f);
  });
}

void broadcast_row(const View& y, const ConstView& row, Stream&) {
  for (int64_t t = 0; t < y.dim(0); ++t) {
    std::copy_n(row.byte_data(), row.bytes(), y.byte_data() + t * row.bytes());
  }
}

void gather_rows(const View& y, const ConstView& x, const ConstView& rows, Stream&) {
  check_rows(rows, x.dim(0), "gather_rows");
  const int32_t* row = rows.as<int32_t>();
  const int64_t bytes = x.cols() * size_of(x.dtype);
  for (int64_t i = 0; i < y.dim(0); ++i) {
    std::copy_n(x.byte_data() + row[i] * bytes, bytes, y.byte_data() + i * bytes);
  }
}

void scatter_add_rows(const View& x, const ConstView& y, const ConstView& rows, Stream&) {
  check_rows(rows, x.dim(0), "scatter_add_rows");
  for_host_type(x.dtype, "scatter_add_rows", [&](auto type) {
    using T = decltype(type);
    const int32_t* row = rows.as<int32_t>();
    const int64_t width = x.cols();
    for (int64_t i = 0; i < y.dim(0); ++i) {
      T* to = x.as<T>() + row[i] * width;
      const T* from = y.as<T>() + i * width;
#pragma omp simd
      for (int64_t c = 0; c < width; ++c)
        to[c] = narrow<T>(widen(to[c]) + widen(from[c]));
    }
  });
}

void reduce(const View& result, const ConstView& x, bool squares, bool accumulate, Context&) {
  for_host_type(x.dtype, "reduce", [&](auto type) {
    using T = decltype(type);
    const double total = squares ? reduce_elements<T, true>(x.as<T>(), x.elements())
                                 : reduce_elements<T, false>(x.as<T>(), x.elements());
    double* out = result.as<double>();
    *out = accumulate ? *out + total : total;
  });
}

void count_nonfinite(const View& count, const ConstView& x, bool accumulate, Stream&) {
  for_host_type(x.dtype, "count_nonfinite", [&](auto type) {
    using T = decltype(type);
    const T* values = x.as<T>();
    const int64_t elements = x.elements();
    int32_t found = 0;
#pragma omp parallel for simd reduction(+ : found) if (parallel : elements > kParallelElements)
    for (int64_t i = 0; i < elements; ++i) {
      // NaN − NaN and ∞ − ∞ are NaN, which is not 0.
      const auto value = widen(values[i]);
      found += (value - value == 0) ? 0 : 1;
    }
    int32_t* out = count.as<int32_t>();
    *out = accumulate ? *out + found : found;
  });
}

}  // namespace host

namespace {

void check_row_operands(const char* operation, const ConstView& few, const ConstView& many,
                        const ConstView& rows) {
  check_operands(few.shape.rank() == 2 && many.shape.rank() == 2 && few.dim(1) == many.dim(1) &&
                     rows.shape == Shape{few.dim(0)} && rows.dtype == DType::kI32 &&
                     is_float_dtype(many.dtype) && few.dtype == many.dtype &&
                     few.device == many.device && rows.device == many.device,
                 operation, "y [n, H], x [T, H], rows [n] i32",
                 {{"y", few}, {"x", many}, {"rows", rows}});
}

void check_scalar(const char* operation, const ConstView& scalar, DType dtype, const ConstView& x) {
  check_operands(scalar.elements() == 1 && scalar.dtype == dtype && is_float_dtype(x.dtype) &&
                     scalar.device == x.device,
                 operation, dtype == DType::kF64 ? "result [1] f64" : "count [1] i32",
                 {{"result", scalar}, {"x", x}});
}

}  // namespace

void add(const View& c, const ConstView& a, const ConstView& b, Stream& stream) {
  check_operands(same_operands(c, {a, b}), "add", "c, a and b alike",
                 {{"c", c}, {"a", a}, {"b", b}});
  if (c.elements() == 0)
    return;
  ROWSHARD_DISPATCH(c.device, add(c, a, b, stream));
}

void scale(const View& x, double factor, Stream& stream) {
  check_operands(is_float_dtype(x.dtype), "scale", "x f64, f32 or bf16", {{"x", x}});
  if (x.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, scale(x, factor, stream));
}

void broadcast_row(const View& y, const ConstView& row, Stream& stream) {
  check_operands(y.shape.rank() == 2 && row.shape == Shape{y.dim(1)} && row.dtype == y.dtype &&
                     row.device == y.device && is_float_dtype(y.dtype),
                 "broadcast_row", "y [T, N], row [N]", {{"y", y}, {"row", row}});
  if (y.elements() == 0)
    return;
  ROWSHARD_DISPATCH(y.device, broadcast_row(y, row, stream));
}

void gather_rows(const View& y, const ConstView& x, const ConstView& rows, Stream& stream) {
  check_row_operands("gather_rows", y, x, rows);
  if (y.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, gather_rows(y, x, rows, stream));
}

void scatter_add_rows(const View& x, const ConstView& y, const ConstView& rows, Stream& stream) {
  check_row_operands("scatter_add_rows", y, x, rows);
  if (y.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, scatter_add_rows(x, y, rows, stream));
}

void sum_of_squares(const View& result, const ConstView& x, bool accumulate, Context& ctx) {
  check_scalar("sum_of_squares", result, DType::kF64, x);
  ROWSHARD_DISPATCH(x.device, reduce(result, x, /*squares=*/true, accumulate, ctx));
}

void sum(const View& result, const ConstView& x, bool accumulate, Context& ctx) {
  check_scalar("sum", result, DType::kF64, x);
  ROWSHARD_DISPATCH(x.device, reduce(result, x, /*squares=*/false, accumulate, ctx));
}

void count_nonfinite(const View& count, const ConstView& x, bool accumulate, Context& ctx) {
  check_scalar("count_nonfinite", count, DType::kI32, x);
  ROWSHARD_DISPATCH(x.device, count_nonfinite(count, x, accumulate, ctx.stream));
}

}  // namespace rowshard
