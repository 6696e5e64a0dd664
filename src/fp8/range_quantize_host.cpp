#include <cmath>

#include "core/error.h"
#include "fp8/formats.h"
#include "fp8/range_quantize.h"

namespace rowshard {

namespace host {

void range_amax(const View& amax, const ConstView& values, int64_t first, int64_t cols, Stream&) {
  const int64_t width = amax.dim(1);
  for (int64_t i = 0; i < values.elements(); ++i) {
    const int64_t row = (first + i) / cols, col = (first + i) % cols;
    float& largest = amax.as<float>()[row / 128 * width + col / 128];
    const float magnitude = std::fabs(values.as<float>()[i]);
    if (magnitude > largest)
      largest = magnitude;
  }
}

void range_encode(const View& codes, const ConstView& values, int64_t first, int64_t cols,
                  const ConstView& amax, const QuantizeOptions& options, Stream&) {
  const int64_t width = amax.dim(1);
  auto* out = reinterpret_cast<uint8_t*>(codes.byte_data());
  for (int64_t i = 0; i < values.elements(); ++i) {
    const int64_t row = (first + i) / cols, col = (first + i) % cols;
    const BlockScale scale =
        block_scale(amax.as<float>()[row / 128 * width + col / 128], 448.0f, options.power_of_two,
                    options.amax_epsilon, largest_finite(DType::kF32));
    out[i] = encode_e4m3(values.as<float>()[i] * scale.multiplier);
  }
}

void block_scales(const View& scales, const ConstView& amax, const QuantizeOptions& options,
                  Stream&) {
  const int64_t width = amax.dim(1), stride = scales.dim(1);
  for (int64_t i = 0; i < scales.elements(); ++i) {
    const int64_t row = i / stride, col = i % stride;
    scales.as<float>()[i] =
        col < width ? block_scale(amax.as<float>()[row * width + col], 448.0f, options.power_of_two,
                                  options.amax_epsilon, largest_finite(DType::kF32))
                          .scale
                    : 1.0f;
  }
}

}  // namespace host

#if ROWSHARD_CUDA
namespace cuda {
void range_amax(const View& amax, const ConstView& values, int64_t first, int64_t cols,
                Stream& stream);
void range_encode(const View& codes, const ConstView& values, int64_t first, int64_t cols,
                  const ConstView& amax, const QuantizeOptions& options, Stream& stream);
void block_scales(const View& scales, const ConstView& amax, const QuantizeOptions& options,
                  Stream& stream);
}  // namespace cuda
#endif

namespace {

void check_range(const char* operation, const ConstView& amax, const ConstView& values,
                 int64_t first, int64_t cols, const Stream& stream) {
  const bool fits = amax.dtype == DType::kF32 && amax.shape.rank() == 2 && cols > 0 && first >= 0 &&
                    amax.dim(1) == ceil_div(cols, 128) && values.dtype == DType::kF32 &&
                    values.shape.rank() == 1 &&
                    first + values.elements() <= amax.dim(0) * 128 * cols &&
                    amax.device == stream.device() && values.device == stream.device();
  ROWSHARD_CHECK(fits, ShapeError, operation, ": elements ", first, " to ",
                 first + values.elements(), " of a matrix of ", cols, " columns: values ",
                 describe(values), ", amax ", describe(amax), " on ", stream.device());
}

}  // namespace

void range_amax(const View& amax, const ConstView& values, int64_t first, int64_t cols,
                Stream& stream) {
  check_range("range_amax", amax, values, first, cols, stream);
  if (values.elements() > 0)
    ROWSHARD_DISPATCH(stream.device(), range_amax(amax, values, first, cols, stream));
}

void range_encode(const View& codes, const ConstView& values, int64_t first, int64_t cols,
                  const ConstView& amax, const QuantizeOptions& options, Stream& stream) {
  check_range("range_encode", amax, values, first, cols, stream);
  ROWSHARD_CHECK(codes.dtype == DType::kE4M3 && codes.shape == values.shape &&
                     codes.device == values.device && options.format == Fp8Format::kE4M3 &&
                     !options.skip,
                 ShapeError, "range_encode: codes ", describe(codes), " of ", describe(values));
  if (values.elements() > 0)
    ROWSHARD_DISPATCH(stream.device(),
                      range_encode(codes, values, first, cols, amax, options, stream));
}

void block_scales(const View& scales, const ConstView& amax, const QuantizeOptions& options,
                  Stream& stream) {
  ROWSHARD_CHECK(
      amax.shape.rank() == 2 && scales.dtype == DType::kF32 && amax.dtype == DType::kF32 &&
          scales.shape ==
              Shape(gemm_scale_shape(Grouping::k128x128, amax.dim(0) * 128, amax.dim(1) * 128)) &&
          scales.device == stream.device() && amax.device == stream.device(),
      ShapeError, "block_scales: ", describe(scales), " of amax ", describe(amax));
  ROWSHARD_DISPATCH(stream.device(), block_scales(scales, amax, options, stream));
}

}  // namespace rowshard
