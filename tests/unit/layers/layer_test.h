// What the tests of this room share: f64 views of plain vectors, gradients by central differences,
// and comparison of a device result in f32 or bf16 with an f64 reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "core/view.h"

namespace rowshard::testing {

using Doubles = std::vector<double>;

inline Doubles random_values(int64_t count, uint32_t seed, double scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0, scale);
  Doubles values(count);
  for (double& value : values)
    value = normal(generator);
  return values;
}

template <typename T>
View view_of(std::vector<T>& values, Shape shape) {
  return View(values.data(), DTypeOf<T>::value, shape, kHost);
}
template <typename T>
ConstView view_of(const std::vector<T>& values, Shape shape) {
  return ConstView(values.data(), DTypeOf<T>::value, shape, kHost);
}

template <typename T>
std::vector<T> narrowed(const Doubles& values) {
  std::vector<T> result;
  for (double value : values)
    result.push_back(static_cast<T>(static_cast<float>(value)));
  return result;
}
template <typename T>
Doubles widened(const std::vector<T>& values) {
  Doubles result;
  for (T value : values)
    result.push_back(static_cast<double>(rowshard::widen(value)));
  return result;
}
/// The values that T can hold: what both the device and the f64 reference then start from.
template <typename T>
Doubles representable(const Doubles& values) {
  return widened(narrowed<T>(values));
}

inline double dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i)
    sum += a[i] * b[i];
  return sum;
}

/// Every `stride`-th element of `gradient` against (loss(x + h) − loss(x − h)) / 2h. The error of a
/// central difference is O(h²) of truncation plus ε/h of rounding: 1e-8 or so at h = 1e-4.
inline void expect_gradient(Doubles& x, const Doubles& gradient,
                            const std::function<double()>& loss, size_t stride = 1,
                            double tolerance = 1e-6) {
  ASSERT_EQ(x.size(), gradient.size());
  constexpr double kStep = 1e-4;
  for (size_t i = 0; i < x.size(); i += stride) {
    const double kept = x[i];
    x[i] = kept + kStep;
    const double above = loss();
    x[i] = kept - kStep;
    const double below = loss();
    x[i] = kept;
    const double expected = (above - below) / (2 * kStep);
    ASSERT_NEAR(gradient[i], expected, tolerance * (1 + std::abs(expected))) << "element " << i;
  }
}

/// |got − want| <= absolute + relative · |want|, element by element; names the worst one.
inline void expect_close(const Doubles& got, const Doubles& want, double absolute,
                         double relative) {
  ASSERT_EQ(got.size(), want.size());
  size_t worst = 0;
  double excess = -1;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(got[i] - want[i]);
    const double over =
        std::isnan(difference) ? INFINITY : difference - absolute - relative * std::abs(want[i]);
    if (i == 0 || over > excess) {
      worst = i;
      excess = over;
    }
  }
  if (!got.empty()) {
    EXPECT_LE(excess, 0) << "element " << worst << ": got " << got[worst] << ", want "
                         << want[worst];
  }
}

inline double largest(const Doubles& values) {
  double result = 0;
  for (double value : values)
    result = std::max(result, std::abs(value));
  return result;
}

/// Half a unit in the last place, relative: the error of one rounding to T.
template <typename T>
inline constexpr double kRounding = std::is_same_v<T, bf16> ? 0x1p-8 : 0x1p-23;

}  // namespace rowshard::testing
