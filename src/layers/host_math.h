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
  constexpr float kRound = 0x1.8p23f;           // adding it rounds to an integer in the low bits
  constexpr float kLn2High = 0x1.62e4p-1f;      // 15 bits: n · kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;    // ln 2 − kLn2High
  const float low = x < -104.0f ? -104.0f : x;  // NaN passes both comparisons
  const float clamped = low > 89.0f ? 89.0f : low;
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
  return p * power(half) * power(exponent - half);
}

}  // namespace rowshard::host
