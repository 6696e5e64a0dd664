#include "fp8/fp8_view.h"

#include "core/error.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void gemm_scales(const View& gemm, const ConstView& compact, Grouping grouping, Stream& stream);
void compact_scales(const View& compact, const ConstView& gemm, Grouping grouping, Stream& stream);
}  // namespace cuda
#endif

const char* to_string(Grouping grouping) {
  switch (grouping) {
    case Grouping::k1x128:
      return "1x128";
    case Grouping::k128x128:
      return "128x128";
    case Grouping::kMx1x32:
      return "mx 1x32";
    case Grouping::kMx32x32:
      return "mx 32x32";
  }
  return "?";
}

DType scale_dtype(Grouping grouping) {
  return is_mx(grouping) ? DType::kE8M0 : DType::kF32;
}

Shape gemm_scale_shape(Grouping grouping, int64_t outer, int64_t inner) {
  switch (grouping) {
    case Grouping::k1x128:
      return {ceil_div(inner, 128), round_up(outer, 4)};
    case Grouping::k128x128:
      return {ceil_div(outer, 128), round_up(ceil_div(inner, 128), 4)};
    default:
      return compact_scale_shape(grouping, outer, inner);
  }
}

Shape compact_scale_shape(Grouping grouping, int64_t outer, int64_t inner) {
  return {ceil_div(outer, outer_block(grouping)), ceil_div(inner, inner_block(grouping))};
}

std::string describe(const ConstFp8View& view) {
  return message(to_string(view.grouping), " codes ", describe(view.codes), ", scales ",
                 describe(view.scales));
}

namespace {

void check_parts(const ConstView& codes, const ConstView& scales, Grouping grouping,
                 Shape (*shape_of)(Grouping, int64_t, int64_t), const char* what) {
  // Only on failure: this runs on every call of every operation.
  const auto got = [&] {
    return message(to_string(grouping), " codes ", describe(codes), ", scales ", describe(scales));
  };
  ROWSHARD_CHECK(codes.shape.rank() == 2, ShapeError, what, ": codes must be a matrix; got ",
                 got());
  ROWSHARD_CHECK(codes.dtype == DType::kE4M3 || codes.dtype == DType::kE5M2, ShapeError, what,
                 ": codes must be e4m3 or e5m2; got ", got());
  const Shape wanted = shape_of(grouping, codes.dim(0), codes.dim(1));
  ROWSHARD_CHECK(scales.dtype == scale_dtype(grouping) && scales.shape == wanted, ShapeError, what,
                 ": scales must be ", to_string(scale_dtype(grouping)), " ", wanted, "; got ",
                 got());
  ROWSHARD_CHECK(codes.device == scales.device, ShapeError, what,
                 ": codes and scales on two devices: ", got());
}

}  // namespace

void check(const ConstFp8View& view, const char* what) {
  check_parts(view.codes, view.scales, view.grouping, gemm_scale_shape, what);
}

void check(const ConstCompactFp8View& view, const char* what) {
  check_parts(view.codes, view.scales, view.grouping, compact_scale_shape, what);
}

namespace host {
namespace {

// Only the 128 groupings differ between the layouts, so scales are f32 here.
void gemm_scales(const View& gemm, const ConstView& compact, Grouping grouping, Stream&) {
  float* to = gemm.as<float>();
  const float* from = compact.as<float>();
  const int64_t rows = gemm.dim(0), stride = gemm.dim(1);
  const int64_t compact_cols = compact.dim(1);
  const bool transposed = grouping == Grouping::k1x128;
  const int64_t valid = transposed ? compact.dim(0) : compact_cols;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < stride; ++c) {
      to[r * stride + c] = c >= valid   ? 1.0f
                           : transposed ? from[c * compact_cols + r]
                                        : from[r * compact_cols + c];
    }
  }
}

void compact_scales(const View& compact, const ConstView& gemm, Grouping grouping, Stream&) {
  float* to = compact.as<float>();
  const float* from = gemm.as<float>();
  const int64_t rows = compact.dim(0), cols = compact.dim(1), stride = gemm.dim(1);
  const bool transposed = grouping == Grouping::k1x128;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      to[r * cols + c] = transposed ? from[c * stride + r] : from[r * stride + c];
    }
  }
}

}  // namespace
}  // namespace host

namespace {

void check_conversion(const ConstView& y_codes, const ConstView& x_codes, Grouping y_grouping,
                      Grouping x_grouping, const Stream& stream) {
  ROWSHARD_CHECK(y_codes.shape == x_codes.shape && y_codes.dtype == x_codes.dtype &&
                     y_grouping == x_grouping && y_codes.device == x_codes.device &&
                     stream.device() == x_codes.device,
                 ShapeError, "layout conversion from ", to_string(x_grouping), " ",
                 describe(x_codes), " to ", to_string(y_grouping), " ", describe(y_codes),
                 " on a stream of ", stream.device());
}

}  // namespace

void to_gemm_layout(const Fp8View& y, const ConstCompactFp8View& x, Stream& stream) {
  check(y, "to_gemm_layout: result");
  check(x, "to_gemm_layout: operand");
  check_conversion(y.codes, x.codes, y.grouping, x.grouping, stream);
  if (y.codes.data != x.codes.data) {
    copy(y.codes, x.codes, stream);
  }
  if (y.scales.elements() == 0) {
    return;
  }
  if (is_mx(x.grouping)) {
    copy(y.scales, x.scales, stream);
  } else {
    ROWSHARD_DISPATCH(stream.device(), gemm_scales(y.scales, x.scales, x.grouping, stream));
  }
}

void to_compact_layout(const CompactFp8View& y, const ConstFp8View& x, Stream& stream) {
  check(y, "to_compact_layout: result");
  check(x, "to_compact_layout: operand");
  check_conversion(y.codes, x.codes, y.grouping, x.grouping, stream);
  if (y.codes.data != x.codes.data) {
    copy(y.codes, x.codes, stream);
  }
  if (y.scales.elements() == 0) {
    return;
  }
  if (is_mx(x.grouping)) {
    copy(y.scales, x.scales, stream);
  } else {
    ROWSHARD_DISPATCH(stream.device(), compact_scales(y.scales, x.scales, x.grouping, stream));
  }
}

}  // namespace rowshard
