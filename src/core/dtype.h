// Element types as they lie in memory, and the 16-bit floats as plain structs.
//
// An e4m3 or e5m2 element is only a byte here: what the byte means, and its scale, is the fp8
// room's business.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#if defined(__CUDACC__)
#define ROWSHARD_HD __host__ __device__
#else
#define ROWSHARD_HD
#endif

namespace rowshard {

enum class DType { kF64, kF32, kF16, kBF16, kE4M3, kE5M2, kE8M0, kU8, kI32, kI64 };

int64_t size_of(DType dtype);  // bytes per element
const char* to_string(DType dtype);

/// bfloat16: the upper half of an fp32. Conversion from float rounds to nearest even; NaN stays
/// NaN.
struct bf16 {
  uint16_t bits;

  bf16() = default;
  ROWSHARD_HD explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    // A NaN whose payload sits in the lower half would round to infinity: keep it quiet instead.
    bits = (u & 0x7fffffffu) > 0x7f800000u
               ? static_cast<uint16_t>((u >> 16) | 0x40u)
               : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  ROWSHARD_HD explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

/// IEEE half precision, by bits; conversions round to nearest even and overflow to infinity.
struct f16 {
  uint16_t bits;

  f16() = default;
  ROWSHARD_HD explicit f16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or above
      half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // normal: rebias 127 -> 15, drop 13 bits
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else if (magnitude < 0x33000000u) {  // below half of the smallest subnormal
      half = 0;
    } else {
      const uint32_t exponent = magnitude >> 23;
      const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const uint32_t shift = 126 - exponent;  // 14 … 24
      const uint32_t rest = mantissa & ((1u << shift) - 1);
      const uint32_t half_way = 1u << (shift - 1);
      half = mantissa >> shift;
      half += (rest > half_way || (rest == half_way && (half & 1u))) ? 1u : 0u;
    }
    bits = static_cast<uint16_t>(sign | half);
  }
  ROWSHARD_HD explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0) {  // zero or subnormal: mantissa x 2^-24, exact in fp32
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
      return sign ? -magnitude : magnitude;
    }
    const uint32_t wide = exponent == 0x1fu ? 0x7f800000u : (exponent + 112u) << 23;
    return std::bit_cast<float>(sign | wide | (mantissa << 13));
  }
};

/// The DType of a C++ element type; only the types a kernel computes with.
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};

/// What a kernel sums in: double for f64 (finite-difference tests), float for all else.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
ROWSHARD_HD inline Accumulator<T> widen(T value) {
  return static_cast<Accumulator<T>>(value);
}
template <typename T>
ROWSHARD_HD inline T narrow(Accumulator<T> value) {
  return static_cast<T>(value);
}

}  // namespace rowshard
