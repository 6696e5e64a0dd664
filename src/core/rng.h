// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): random
// numbers as a pure function of (key, counter). The same element has the same value on both
// devices, at any rank count and in any order of evaluation, so initial values and dropout masks
// need no state.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"

namespace rowshard {

struct Philox {
  uint64_t seed = 0;
  uint64_t stream = 0;  // one per use: a tensor, a dropout site and step

  /// Four independent 32-bit words for this index.
  ROWSHARD_HD std::array<uint32_t, 4> words(uint64_t index) const {
    uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
    uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
  }
  /// Uniform in [0, 1) with 24 bits; element `index`.
  ROWSHARD_HD float uniform(uint64_t index) const {
    return static_cast<float>(words(index / 4)[index % 4] >> 8) * 0x1p-24f;
  }
  /// Standard normal by Box and Muller.
  float normal(uint64_t index) const {
    const auto w = words(index);
    const double u = (w[0] + 0.5) * 0x1p-32, v = (w[1] + 0.5) * 0x1p-32;
    return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v));
  }
};

}  // namespace rowshard
