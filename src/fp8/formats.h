// The 8-bit formats, bit exact on both devices.
//
//   e4m3  1 sign, 4 exponent (bias 7), 3 mantissa bits; finite up to 448, no infinity, NaN =
//   0x7f/0xff e5m2  1 sign, 5 exponent (bias 15), 2 mantissa bits; finite up to 57344, IEEE
//   infinity and NaN e8m0  an unsigned power of two 2^(code-127), code 0 … 254; 255 is NaN (OCP MX
//   specification)
//
// Encoding rounds to nearest even and saturates to the largest finite value, infinities included;
// any NaN becomes 0x7f. That is what cvt.rn.satfinite does, so kernels may use the instruction.
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"

namespace rowshard {

enum class Fp8Format { kE4M3, kE5M2 };

DType dtype_of(Fp8Format format);
/// Throws ShapeError for a dtype that is not e4m3 or e5m2.
Fp8Format format_of(DType dtype);
const char* to_string(Fp8Format format);

ROWSHARD_HD constexpr float fp8_max(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? 448.0f : 57344.0f;
}

namespace detail {

ROWSHARD_HD constexpr int32_t select(bool condition, int32_t yes, int32_t no) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// Shared by both formats. Signed integers and no branches, so that compilers turn a loop over it
// into vector code.
template <int kExponentBias, int kMantissaBits, int32_t kLargestBits>
ROWSHARD_HD inline uint8_t encode_fp8(float value) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr int32_t kSmallestNormal = (128 - kExponentBias) << 23;
  // Adding 2^e whose last mantissa bit is the format's subnormal step makes the FPU round for us.
  constexpr int32_t kRounder = (128 - kExponentBias + kShift) << 23;
  const int32_t bits = std::bit_cast<int32_t>(value);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t finite = magnitude < kLargestBits ? magnitude : kLargestBits;
  const int32_t normal = ((finite + (1 << (kShift - 1)) - 1 + ((finite >> kShift) & 1)) >> kShift) -
                         ((127 - kExponentBias) << kMantissaBits);
  const float shifted = std::bit_cast<float>(finite) + std::bit_cast<float>(kRounder);
  const int32_t subnormal = std::bit_cast<int32_t>(shifted) - kRounder;
  const int32_t code = select(finite < kSmallestNormal, subnormal, normal) | ((bits >> 24) & 0x80);
  return static_cast<uint8_t>(select(magnitude > 0x7f800000, 0x7f, code));
}

}  // namespace detail

ROWSHARD_HD inline uint8_t encode_e4m3(float value) {
  return detail::encode_fp8<7, 3, 0x43e00000>(value);  // 448
}
ROWSHARD_HD inline uint8_t encode_e5m2(float value) {
  return detail::encode_fp8<15, 2, 0x47600000>(value);  // 57344
}
template <Fp8Format kFormat>
ROWSHARD_HD inline uint8_t encode(float value) {
  if constexpr (kFormat == Fp8Format::kE4M3) {
    return encode_e4m3(value);
  } else {
    return encode_e5m2(value);
  }
}

ROWSHARD_HD inline float decode_e4m3(uint8_t code) {
  const int32_t magnitude = code & 0x7f;
  // Below 2^-6 the mantissa counts steps of 2^-9.
  const int32_t subnormal = std::bit_cast<int32_t>(static_cast<float>(magnitude) * 0x1p-9f);
  const int32_t normal = (magnitude << 20) + (120 << 23);
  const int32_t finite = detail::select(magnitude < 8, subnormal, normal);
  const int32_t value = detail::select(magnitude == 0x7f, 0x7fc00000, finite);
  return std::bit_cast<float>(static_cast<uint32_t>(value) | (code & 0x80u) << 24);
}
ROWSHARD_HD inline float decode_e5m2(uint8_t code) {
  const int32_t magnitude = code & 0x7f;
  const int32_t subnormal = std::bit_cast<int32_t>(static_cast<float>(magnitude) * 0x1p-16f);
  const int32_t normal = (magnitude << 21) + (112 << 23);
  const int32_t finite = detail::select(magnitude < 4, subnormal, normal);
  const int32_t special = (magnitude << 21) + (224 << 23);  // infinity, or a NaN with its payload
  const int32_t value = detail::select(magnitude >= 0x7c, special, finite);
  return std::bit_cast<float>(static_cast<uint32_t>(value) | (code & 0x80u) << 24);
}
template <Fp8Format kFormat>
ROWSHARD_HD inline float decode(uint8_t code) {
  if constexpr (kFormat == Fp8Format::kE4M3) {
    return decode_e4m3(code);
  } else {
    return decode_e5m2(code);
  }
}
/// The 256 values of a format, for the host.
const float* decode_table(Fp8Format format);

/// 2^(code - 127); code 0 is the subnormal 2^-127, 255 is NaN.
ROWSHARD_HD inline float decode_e8m0(uint8_t code) {
  const uint32_t bits = code == 0 ? 0x00400000u : code == 0xff ? 0x7fc00000u : code * 0x00800000u;
  return std::bit_cast<float>(bits);
}
/// The smallest power of two that is not below `value` >= 0, as e8m0: rounding up never saturates a
/// block. NaN gives 0xff, infinity and everything above 2^127 0xfe, values up to 2^-127 and zero 0.
ROWSHARD_HD inline uint8_t encode_e8m0_up(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (bits > 0x7f800000u) {
    return 0xff;
  }
  if (bits >= 0x7f000000u) {
    return 0xfe;
  }
  if (bits <= 0x00400000u) {
    return 0;
  }
  return static_cast<uint8_t>((bits + 0x7fffffu) >> 23);
}

/// How one block is scaled: codes = encode(x · multiplier), value = code · scale.
struct BlockScale {
  float multiplier;
  float scale;
};

/// The scale rule of the 128 groupings, from the block's largest magnitude (NaN elements left out).
///   largest_input  the largest finite value of the input's dtype: what a multiplier that overflows
///                  becomes before it is cut to a power of two
/// A block of zeros, or one that holds an infinity, is stored unscaled.
ROWSHARD_HD inline BlockScale block_scale(float amax, float fp8_largest, bool power_of_two,
                                          float amax_epsilon, float largest_input) {
  if (amax < amax_epsilon) {
    amax = amax_epsilon;
  }
  const uint32_t bits = std::bit_cast<uint32_t>(amax);
  if (bits == 0 || bits >= 0x7f800000u) {
    return {1.0f, 1.0f};
  }
  float multiplier = fp8_largest / amax;
  if (std::bit_cast<uint32_t>(multiplier) == 0x7f800000u) {
    multiplier = largest_input;
  }
  if (power_of_two) {
    multiplier = std::bit_cast<float>(std::bit_cast<uint32_t>(multiplier) & 0x7f800000u);
  }
  return {multiplier, 1.0f / multiplier};
}

/// The MX rule: the code of the decode scale of a group of 32, from its largest magnitude.
ROWSHARD_HD inline uint8_t mx_scale_code(float amax, float fp8_largest) {
  return encode_e8m0_up(amax * (1.0f / fp8_largest));
}
/// The multiplier that belongs to an e8m0 code: 2^(127 - code).
ROWSHARD_HD inline float mx_multiplier(uint8_t code) {
  const uint32_t bits = code == 254 ? 0x00400000u : code == 255 ? 0x7fc00000u : (254u - code) << 23;
  return std::bit_cast<float>(bits);
}

ROWSHARD_HD constexpr float largest_finite(DType dtype) {
  return dtype == DType::kF16 ? 65504.0f : dtype == DType::kBF16 ? 0x1.fep127f : 0x1.fffffep127f;
}

}  // namespace rowshard
