#include <algorithm>
#include <tuple>

#include "core/error.h"
#include "fp8/quantize.h"
#include "fp8/scale_grid.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void quantize(const Fp8View* rowwise, const Fp8View* columnwise, const ConstView& x,
              const QuantizeOptions& options, Stream& stream);
void dequantize(const View& y, const ConstFp8View& x, Stream& stream);
}  // namespace cuda
#endif

namespace host {
namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kParallelElements = 16384;

/// max |x| without NaN elements. As integers, because the order of magnitudes is that of their
/// bits.
float amax_of(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
    largest = std::max(largest, detail::select(magnitude > 0x7f800000, 0, magnitude));
  }
  return std::bit_cast<float>(largest);
}

template <Fp8Format kFormat>
void encode_row(uint8_t* codes, const float* x, int64_t count, float multiplier) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = encode<kFormat>(x[i] * multiplier);
  }
}

/// `count` elements as f32: the source itself when it is f32, else `buffer`.
template <typename T>
const float* widened(const T* x, int64_t count, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    for (int64_t i = 0; i < count; ++i) {
      buffer[i] = static_cast<float>(x[i]);
    }
    return buffer;
  }
}

/// One matrix and its rule; `Rule` turns an amax into the multiplier and stores the scale.
struct Job {
  const void* x;
  int64_t rows, cols;  // M, K
  Grouping grouping;
  int64_t block;  // 128 or 32
  float fp8_largest;
  float largest_input;
  bool power_of_two;
  float amax_epsilon;

  /// The multiplier of a block; its scale is written at `index`.
  float scale_block(float amax, const View& scales, int64_t index) const {
    if (is_mx(grouping)) {
      const uint8_t code = mx_scale_code(amax, fp8_largest);
      static_cast<uint8_t*>(scales.data)[index] = code;
      return mx_multiplier(code);
    }
    const BlockScale scale =
        block_scale(amax, fp8_largest, power_of_two, amax_epsilon, largest_input);
    static_cast<float*>(scales.data)[index] = scale.scale;
    return scale.multiplier;
  }
};

/// Everything of the scale matrix that belongs to no element becomes 1.
void pad_scales(const Fp8View& view) {
  if (is_mx(view.grouping)) {
    return;
  }
  float* scales = view.scales.as<float>();
  const int64_t stride = view.scales.dim(1);
  const int64_t valid =
      view.grouping == Grouping::k1x128 ? view.outer() : ceil_div(view.inner(), 128);
  for (int64_t r = 0; r < view.scales.dim(0); ++r) {
    std::fill(scales + r * stride + valid, scales + (r + 1) * stride, 1.0f);
  }
}

/// Groups along the rows of x: 1×128 and MX 1×32, rowwise.
template <typename T, Fp8Format kFormat>
void quantize_rows(const Fp8View& y, const Job& job) {
  const T* x = static_cast<const T*>(job.x);
  auto* codes = static_cast<uint8_t*>(y.codes.data);
  const ScaleGrid grid{ConstFp8View(y)};
#pragma omp parallel for if (job.rows * job.cols > kParallelElements)
  for (int64_t row = 0; row < job.rows; ++row) {
    float buffer[128];
    for (int64_t begin = 0; begin < job.cols; begin += job.block) {
      const int64_t count = std::min(job.block, job.cols - begin);
      const float* values = widened(x + row * job.cols + begin, count, buffer);
      const float multiplier =
          job.scale_block(amax_of(values, count), y.scales, grid.index(row, begin / job.block));
      encode_row<kFormat>(codes + row * job.cols + begin, values, count, multiplier);
    }
  }
}

/// Groups along the columns of x: 1×128 and MX 1×32, columnwise. y is [K, M].
template <typename T, Fp8Format kFormat>
void quantize_columns(const Fp8View& y, const Job& job) {
  const T* x = static_cast<const T*>(job.x);
  auto* codes = static_cast<uint8_t*>(y.codes.data);
  const ScaleGrid grid{ConstFp8View(y)};
  constexpr int64_t kStrip = 64;  // columns taken at once, so that rows of x are read in pieces
#pragma omp parallel for collapse(2) if (job.rows * job.cols > kParallelElements)
  for (int64_t row = 0; row < job.rows; row += job.block) {
    for (int64_t strip = 0; strip < job.cols; strip += kStrip) {
      const int64_t height = std::min(job.block, job.rows - row);
      const int64_t width = std::min(kStrip, job.cols - strip);
      float transposed[kStrip * 128];
      float buffer[kStrip];
      for (int64_t r = 0; r < height; ++r) {
        const float* values = widened(x + (row + r) * job.cols + strip, width, buffer);
        for (int64_t c = 0; c < width; ++c) {
          transposed[c * 128 + r] = values[c];
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        const float* values = transposed + c * 128;
        const float multiplier = job.scale_block(amax_of(values, height), y.scales,
                                                 grid.index(strip + c, row / job.block));
        encode_row<kFormat>(codes + (strip + c) * job.rows + row, values, height, multiplier);
      }
    }
  }
}

/// Square blocks: one code for both copies.
template <typename T, Fp8Format kFormat>
void quantize_squares(const Fp8View* rowwise, const Fp8View* columnwise, const Job& job) {
  const T* x = static_cast<const T*>(job.x);
#pragma omp parallel for collapse(2) if (job.rows * job.cols > kParallelElements)
  for (int64_t row = 0; row < job.rows; row += job.block) {
    for (int64_t col = 0; col < job.cols; col += job.block) {
      const int64_t height = std::min(job.block, job.rows - row);
      const int64_t width = std::min(job.block, job.cols - col);
      float buffer[128];
      uint8_t codes[128 * 128];
      float amax = 0;
      for (int64_t r = 0; r < height; ++r) {
        const float* values = widened(x + (row + r) * job.cols + col, width, buffer);
        amax = std::max(amax, amax_of(values, width));
      }
      float multiplier = 1;
      for (const auto& [copy, outer, inner] :
           {std::tuple{rowwise, row, col}, std::tuple{columnwise, col, row}}) {
        if (copy) {
          const ScaleGrid grid{ConstFp8View(*copy)};
          multiplier = job.scale_block(amax, copy->scales, grid.index(outer, inner / job.block));
        }
      }
      for (int64_t r = 0; r < height; ++r) {
        const float* values = widened(x + (row + r) * job.cols + col, width, buffer);
        encode_row<kFormat>(codes + r * width, values, width, multiplier);
      }
      if (rowwise) {
        auto* to = static_cast<uint8_t*>(rowwise->codes.data) + row * job.cols + col;
        for (int64_t r = 0; r < height; ++r) {
          std::copy_n(codes + r * width, width, to + r * job.cols);
        }
      }
      if (columnwise) {
        auto* to = static_cast<uint8_t*>(columnwise->codes.data) + col * job.rows + row;
        for (int64_t c = 0; c < width; ++c) {
          for (int64_t r = 0; r < height; ++r) {
            to[c * job.rows + r] = codes[r * width + c];
          }
        }
      }
    }
  }
}

template <typename T, Fp8Format kFormat>
void quantize_as(const Fp8View* rowwise, const Fp8View* columnwise, const Job& job) {
  if (rebuildable(job.grouping)) {
    quantize_squares<T, kFormat>(rowwise, columnwise, job);
  } else {
    if (rowwise) {
      quantize_rows<T, kFormat>(*rowwise, job);
    }
    if (columnwise) {
      quantize_columns<T, kFormat>(*columnwise, job);
    }
  }
}

template <typename T>
void quantize_from(const Fp8View* rowwise, const Fp8View* columnwise, const Job& job,
                   Fp8Format format) {
  if (format == Fp8Format::kE4M3) {
    quantize_as<T, Fp8Format::kE4M3>(rowwise, columnwise, job);
  } else {
    quantize_as<T, Fp8Format::kE5M2>(rowwise, columnwise, job);
  }
}

void quantize(const Fp8View* rowwise, const Fp8View* columnwise, const ConstView& x,
              const QuantizeOptions& options, Stream&) {
  if (options.skip && *options.skip == 1.0f) {
    return;
  }
  const Grouping grouping = rowwise ? rowwise->grouping : columnwise->grouping;
  const Job job{x.data,
                x.rows(),
                x.cols(),
                grouping,
                inner_block(grouping),
                fp8_max(options.format),
                largest_finite(x.dtype),
                options.power_of_two,
                options.amax_epsilon};
  switch (x.dtype) {
    case DType::kF32:
      quantize_from<float>(rowwise, columnwise, job, options.format);
      break;
    case DType::kBF16:
      quantize_from<bf16>(rowwise, columnwise, job, options.format);
      break;
    default:
      quantize_from<f16>(rowwise, columnwise, job, options.format);
  }
  for (const Fp8View* copy : {rowwise, columnwise}) {
    if (copy) {
      pad_scales(*copy);
    }
  }
}

template <Fp8Format kFormat, typename T>
void dequantize_as(T* y, const ConstFp8View& x) {
  const auto* codes = static_cast<const uint8_t*>(x.codes.data);
  const ScaleGrid grid(x);
  const int64_t outer = x.outer(), inner = x.inner(), block = inner_block(x.grouping);
#pragma omp parallel for if (outer * inner > kParallelElements)
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t begin = 0; begin < inner; begin += block) {
      const float scale = grid.at(o, begin / block);
      const int64_t end = std::min(begin + block, inner);
      const uint8_t* from = codes + o * inner;
      T* to = y + o * inner;
      for (int64_t i = begin; i < end; ++i) {
        to[i] = static_cast<T>(decode<kFormat>(from[i]) * scale);
      }
    }
  }
}

template <typename T>
void dequantize_to(T* y, const ConstFp8View& x) {
  if (x.codes.dtype == DType::kE4M3) {
    dequantize_as<Fp8Format::kE4M3>(y, x);
  } else {
    dequantize_as<Fp8Format::kE5M2>(y, x);
  }
}

void dequantize(const View& y, const ConstFp8View& x, Stream&) {
  switch (y.dtype) {
    case DType::kF32:
      return dequantize_to(y.as<float>(), x);
    case DType::kBF16:
      return dequantize_to(y.as<bf16>(), x);
    default:
      return dequantize_to(y.as<f16>(), x);
  }
}

}  // namespace
}  // namespace host

namespace {

bool is_high_precision(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

void check_copy(const Fp8View& copy, int64_t outer, int64_t inner, const char* what,
                const ConstView& x, const QuantizeOptions& options, const Stream& stream) {
  check(copy, what);
  ROWSHARD_CHECK(copy.codes.shape == (Shape{outer, inner}) &&
                     copy.codes.dtype == dtype_of(options.format) && copy.codes.device == x.device,
                 ShapeError, what, " of ", describe(x), " must be codes ",
                 to_string(options.format), " ", Shape{outer, inner}, " on ", x.device, "; got ",
                 describe(copy));
  ROWSHARD_CHECK(stream.device() == x.device, ShapeError, what, ": operand on ", x.device,
                 ", stream on ", stream.device());
}

}  // namespace

void quantize(const Fp8View* rowwise, const Fp8View* columnwise, const ConstView& x,
              const QuantizeOptions& options, Stream& stream) {
  ROWSHARD_CHECK(x.shape.rank() >= 1 && is_high_precision(x.dtype), ShapeError,
                 "quantize takes f32, bf16 or f16; got ", describe(x));
  if (x.elements() == 0) {
    return;
  }
  const int64_t rows = x.rows(), cols = x.cols();
  if (rowwise) {
    check_copy(*rowwise, rows, cols, "quantize: the rowwise copy", x, options, stream);
  }
  if (columnwise) {
    check_copy(*columnwise, cols, rows, "quantize: the columnwise copy", x, options, stream);
  }
  ROWSHARD_CHECK(!rowwise || !columnwise || rowwise->grouping == columnwise->grouping, ShapeError,
                 "quantize: two groupings at once: rowwise ", to_string(rowwise->grouping),
                 ", columnwise ", to_string(columnwise->grouping));
  ROWSHARD_CHECK(options.amax_epsilon >= 0, ConfigError, "quantize: an amax_epsilon of ",
                 options.amax_epsilon);
  if (!rowwise && !columnwise) {
    return;
  }
  const Grouping grouping = rowwise ? rowwise->grouping : columnwise->grouping;
  ROWSHARD_CHECK(!is_mx(grouping) || options.amax_epsilon == 0, ConfigError,
                 "quantize: MX scales have no amax_epsilon; got ", options.amax_epsilon);
  ROWSHARD_DISPATCH(stream.device(), quantize(rowwise, columnwise, x, options, stream));
}

void dequantize(const View& y, const ConstFp8View& x, Stream& stream) {
  check(x, "dequantize");
  ROWSHARD_CHECK(y.shape.rank() >= 1 && y.rows() == x.outer() && y.cols() == x.inner() &&
                     is_high_precision(y.dtype) && y.device == x.codes.device &&
                     stream.device() == y.device,
                 ShapeError, "dequantize ", describe(x), " to ", describe(y));
  if (y.elements() == 0) {
    return;
  }
  ROWSHARD_DISPATCH(stream.device(), dequantize(y, x, stream));
}

}  // namespace rowshard
