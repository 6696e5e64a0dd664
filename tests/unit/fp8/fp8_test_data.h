// Test data whose blocks differ in magnitude, so that a misplaced scale shows, and a quantiser that
// follows the text of the rule element by element.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/rng.h"
#include "fp8/fp8_view.h"
#include "fp8/quantize.h"
#include "test_device.h"

namespace rowshard::testing {

inline constexpr Grouping kGroupings[] = {Grouping::k1x128, Grouping::k128x128, Grouping::kMx1x32,
                                          Grouping::kMx32x32};

/// [rows, cols] normal values, each 32×32 tile and each row of it with a power of two of its own.
inline std::vector<float> many_scales(int64_t rows, int64_t cols, uint64_t seed,
                                      double magnitude = 1) {
  const Philox rng{seed, 1};
  std::vector<float> x(rows * cols);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const int exponent =
          static_cast<int>((r / 32 * 7 + c / 32 * 3 + r % 3 * 2 + c % 5) % 23) - 11;
      x[r * cols + c] =
          static_cast<float>(std::ldexp(magnitude * rng.normal(r * cols + c), exponent));
    }
  }
  return x;
}

/// Blocks that are zero, tiny, huge, infinite or NaN, tile by tile.
inline std::vector<float> edge_blocks(int64_t rows, int64_t cols, DType dtype) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float tiny = dtype == DType::kF16 ? 0x1p-24f : 0x1p-133f;
  std::vector<float> x = many_scales(rows, cols, 5);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      float& value = x[r * cols + c];
      const bool spot = (r * 31 + c * 17) % 29 == 0;
      switch ((r / 32 * 5 + c / 32) % 9) {
        case 0:
          value = spot ? -0.0f : 0.0f;
          break;
        case 1:
          value = std::copysign(tiny * (1 + (r + c) % 3), value);
          break;
        case 2:
          value = std::copysign(largest_finite(dtype) * (spot ? 1.0f : 0.25f), value);
          break;
        case 3:
          value = spot ? std::copysign(inf, value) : value;
          break;
        case 4:
          value = spot ? nan : value;
          break;
        case 5:
          value = nan;
          break;
        case 6:
          value = std::copysign(spot ? 448.0f : 1.0f, value);
          break;
        case 7:
          value = std::copysign(spot ? 448.5f : 100.0f, value);
          break;
        default:
          break;
      }
    }
  }
  return x;
}

/// Uploads f32 values rounded to `dtype`, and rounds `values` itself likewise.
inline Tensor upload_as(Bench& bench, std::vector<float>& values, DType dtype, Shape shape) {
  if (dtype == DType::kF32) {
    return bench.upload(values, shape);
  }
  Tensor tensor = bench.arena.tensor(Category::kActivations, "test", dtype, shape);
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kBF16) {
      const bf16 rounded(values[i]);
      bits[i] = rounded.bits;
      values[i] = static_cast<float>(rounded);
    } else {
      const f16 rounded(values[i]);
      bits[i] = rounded.bits;
      values[i] = static_cast<float>(rounded);
    }
  }
  copy(tensor, ConstView(bits.data(), dtype, shape, kHost), bench.stream);
  bench.stream.synchronize();
  return tensor;
}

/// An FP8 copy with memory of its own.
struct Fp8Tensor {
  Tensor codes, scales;
  Grouping grouping;

  Fp8Tensor(Bench& bench, Grouping grouping_, int64_t outer, int64_t inner,
            Fp8Format format = Fp8Format::kE4M3)
      : codes(
            bench.arena.tensor(Category::kActivations, "codes", dtype_of(format), {outer, inner})),
        scales(bench.arena.tensor(Category::kScales, "scales", scale_dtype(grouping_),
                                  gemm_scale_shape(grouping_, outer, inner))),
        grouping(grouping_) {}

  Fp8View view() const { return {codes, scales, grouping}; }
};

/// A matrix quantised on the device under test, every tile of a magnitude of its own.
inline Fp8Tensor quantized(Bench& bench, Grouping grouping, int64_t outer, int64_t inner,
                           uint64_t seed, bool power_of_two) {
  Fp8Tensor tensor(bench, grouping, outer, inner);
  const Fp8View view = tensor.view();
  QuantizeOptions options;
  options.power_of_two = power_of_two;
  const Tensor values = bench.upload(many_scales(outer, inner, seed, 1e-2), {outer, inner});
  quantize(&view, nullptr, values, options, bench.stream);
  bench.stream.synchronize();
  return tensor;
}

/// Both parts as they lie in memory, padding included.
struct Fp8Bytes {
  std::vector<uint8_t> codes, scales;
  bool operator==(const Fp8Bytes&) const = default;
};

inline Fp8Bytes download(Bench& bench, const ConstFp8View& view) {
  return {bench.download<uint8_t>(view.codes), bench.download<uint8_t>(view.scales)};
}

/// "equal", or the first byte that differs.
inline std::string difference(const std::vector<uint8_t>& got, const std::vector<uint8_t>& wanted) {
  if (got.size() != wanted.size()) {
    return message(got.size(), " bytes, wanted ", wanted.size());
  }
  const auto at = std::mismatch(got.begin(), got.end(), wanted.begin());
  return at.first == got.end()
             ? "equal"
             : message("byte ", at.first - got.begin(), " of ", got.size(), " is ",
                       static_cast<int>(*at.first), ", wanted ", static_cast<int>(*at.second));
}

/// The rule, one block after the other. x is [outer, inner] with the wanted direction along inner:
/// transpose first for a columnwise copy.
inline Fp8Bytes quantize_by_the_book(const std::vector<float>& x, int64_t outer, int64_t inner,
                                     Grouping grouping, DType dtype,
                                     const QuantizeOptions& options) {
  const double fp8_largest = options.format == Fp8Format::kE4M3 ? 448 : 57344;
  const int64_t tall = outer_block(grouping), wide = inner_block(grouping);
  const Shape shape = gemm_scale_shape(grouping, outer, inner);
  std::vector<float> scales(shape.elements(), 1.0f);
  std::vector<uint8_t> mx_scales(shape.elements(), 0);
  Fp8Bytes result;
  result.codes.resize(outer * inner);
  for (int64_t o = 0; o < outer; o += tall) {
    for (int64_t i = 0; i < inner; i += wide) {
      float amax = 0;
      const int64_t o_end = std::min(o + tall, outer), i_end = std::min(i + wide, inner);
      for (int64_t r = o; r < o_end; ++r) {
        for (int64_t c = i; c < i_end; ++c) {
          amax = std::fmax(amax, std::fabs(x[r * inner + c]));
        }
      }
      float multiplier = 1;
      if (is_mx(grouping)) {
        const float wanted = amax * (1.0f / static_cast<float>(fp8_largest));
        int code = 254;
        if (std::isfinite(wanted)) {
          code = 0;  // the first power of two that is not below
          while (code < 254 && std::ldexp(1.0, code - 127) < wanted) {
            ++code;
          }
        }
        mx_scales[o / tall * shape[1] + i / wide] = static_cast<uint8_t>(code);
        multiplier = static_cast<float>(std::ldexp(1.0, 127 - code));
      } else {
        amax = std::max(amax, options.amax_epsilon);
        if (amax != 0 && std::isfinite(amax)) {
          multiplier = static_cast<float>(fp8_largest) / amax;
          if (std::isinf(multiplier)) {
            multiplier = dtype == DType::kBF16  ? 3.3895313892515355e38f
                         : dtype == DType::kF16 ? 65504.0f
                                                : std::numeric_limits<float>::max();
          }
          if (options.power_of_two) {
            int exponent;
            std::frexp(multiplier, &exponent);
            multiplier = std::ldexp(1.0f, exponent - 1);
          }
        }
        const int64_t at =
            grouping == Grouping::k1x128 ? i / 128 * shape[1] + o : o / 128 * shape[1] + i / 128;
        scales[at] = 1.0f / multiplier;
      }
      for (int64_t r = o; r < o_end; ++r) {
        for (int64_t c = i; c < i_end; ++c) {
          const float scaled = x[r * inner + c] * multiplier;
          result.codes[r * inner + c] =
              options.format == Fp8Format::kE4M3 ? encode_e4m3(scaled) : encode_e5m2(scaled);
        }
      }
    }
  }
  if (is_mx(grouping)) {
    result.scales = mx_scales;
  } else {
    result.scales.resize(scales.size() * 4);
    std::copy_n(reinterpret_cast<const uint8_t*>(scales.data()), result.scales.size(),
                result.scales.data());
  }
  return result;
}

inline std::vector<float> transposed(const std::vector<float>& x, int64_t rows, int64_t cols) {
  std::vector<float> y(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      y[c * rows + r] = x[r * cols + c];
    }
  }
  return y;
}

}  // namespace rowshard::testing
