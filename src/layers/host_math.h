// exp for host loops: std::exp is a call an element, this one is arithmetic that the compiler turns
// into vector instructions.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace rowshard::host {

inline double fast_exp(double x) {
  return std::exp(x);
}

/// Within 2 units in the last place of exp(x) for every float, also where the result is subnormal;
/// overflows to infinity, underflows to 0, keeps NaN.
///
/// x = n·ln 2 + r with |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of degree 7 (remainder
/// below 2^-30); times 2^n in two factors, because n reaches beyond the exponents of a float.
inline float fast_exp(float x) {
  constexpr float kRound = 0x1.8p23f;         // adding it rounds to an integer in the low bits
  constexpr float kLn2High = 0x1.62e4p-1f;    // 15 bits: n · kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;  // ln 2 − kLn2High
  // Integer comparisons, because a float comparison may trap and so is not made a vector operation.
  constexpr uint32_t kLimit = std::bit_cast<uint32_t>(104.0f);  // beyond it: 0 or infinity
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const float clamped =
      std::bit_cast<float>((magnitude < kLimit ? magnitude : kLimit) | (bits & 0x80000000u));
  const float shifted = clamped * 0x1.715476p0f + kRound;
  const float n = shifted - kRound;
  const int32_t exponent =
      static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = (p * r) * r + r + 1.0f;
  const int32_t half = exponent >> 1;
  const auto power = [](int32_t e) {
    return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23);
  };
  const float result = p * power(half) * power(exponent - half);
  // All ones for a NaN. A branch, or a choice that becomes one, would keep the loop scalar.
  const uint32_t nan = static_cast<uint32_t>(static_cast<int32_t>(0x7f800000u - magnitude) >> 31);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(result) | (nan & 0x7fc00000u));
}

}  // namespace rowshard::host
