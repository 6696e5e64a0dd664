#include "layers/rope.h"

#include <numbers>

#include "layer_test.h"
#include "layers/segments.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

Doubles rotated(const Doubles& x, const std::vector<int32_t>& positions, int64_t heads, int64_t d,
                double theta) {
  Doubles y = x;
  for (size_t t = 0; t < positions.size(); ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < d / 2; ++i) {
        const double angle = positions[t] * std::pow(theta, -2.0 * i / d);
        const size_t at = (t * heads + h) * d + i;
        y[at] = x[at] * std::cos(angle) - x[at + d / 2] * std::sin(angle);
        y[at + d / 2] = x[at + d / 2] * std::cos(angle) + x[at] * std::sin(angle);
      }
    }
  }
  return y;
}

const std::vector<int32_t> kPositions{0, 1, 2, 3, 0, 1, 511, 7, 64};

template <typename T>
class RopeOnDevice : public ::testing::Test {};
using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(RopeOnDevice, Types);

TYPED_TEST(RopeOnDevice, TurnsHalvesAndBack) {
  using T = TypeParam;
  Bench bench;
  for (int64_t d : {8, 64, 128}) {
    SCOPED_TRACE(d);
    const int64_t heads = 3;
    const Shape shape{9, heads, d};
    const Doubles x = testing::representable<T>(testing::random_values(9 * heads * d, 1));
    const RopeTable table(d, 512, 10000, std::nullopt, bench.ctx);
    const Tensor xt = bench.upload(testing::narrowed<T>(x), shape);
    const Tensor positions = bench.upload(kPositions, {9});
    rope(xt, positions, table, RopeDirection::kForward, bench.stream);
    // One rounding of a sum of two products; its terms may be larger than the result.
    const double rounding = testing::kRounding<T> * 2 * testing::largest(x);
    testing::expect_close(testing::widened(bench.download<T>(xt)),
                          rotated(x, kPositions, heads, d, 10000), rounding, 1e-6);
    rope(xt, positions, table, RopeDirection::kBackward, bench.stream);
    testing::expect_close(testing::widened(bench.download<T>(xt)), x, 2 * rounding, 1e-6);
  }
}

TEST(Rope, BackwardAgreesWithFiniteDifferences) {
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  const Shape shape{9, 2, 6};
  Doubles x = testing::random_values(9 * 2 * 6, 1);
  Doubles dy = testing::random_values(9 * 2 * 6, 2);
  const RopeTable table(6, 512, 10000, std::nullopt, ctx);
  const ConstView positions = view_of(kPositions, {9});
  Doubles dx = dy;
  rope(view_of(dx, shape), positions, table, RopeDirection::kBackward, stream);
  testing::expect_gradient(x, dx, [&] {
    Doubles y = x;
    rope(view_of(y, shape), positions, table, RopeDirection::kForward, stream);
    return testing::dot(y, dy);
  });
}

// The three ranges of Llama 3.1's rule, each with its own formula.
TEST(Rope, Llama3ScalingKeepsFastDividesSlowAndBlendsBetween) {
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  const int64_t d = 128;
  const double theta = 500000, pi = std::numbers::pi;
  const RopeTable table(d, 4, theta, Llama3RopeScaling{}, ctx);
  const RopeTable plain(d, 4, theta, std::nullopt, ctx);
  int kept = 0, divided = 0, blended = 0;
  for (int64_t i = 0; i < d / 2; ++i) {
    const double f = std::pow(theta, -2.0 * i / d), wavelength = 2 * pi / f;
    double expected = f;
    if (wavelength > 8192) {
      expected = f / 8;
      ++divided;
    } else if (wavelength >= 8192 / 4.0) {
      const double smooth = (8192 / wavelength - 1) / (4 - 1);
      expected = (1 - smooth) * f / 8 + smooth * f;
      ++blended;
    } else {
      ++kept;
    }
    EXPECT_NEAR(table.sin.as<float>()[3 * d / 2 + i], std::sin(3 * expected), 1e-7);
    EXPECT_NEAR(table.cos.as<float>()[3 * d / 2 + i], std::cos(3 * expected), 1e-7);
    EXPECT_NEAR(plain.sin.as<float>()[3 * d / 2 + i], std::sin(3 * f), 1e-7);
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(divided, 0);
  EXPECT_GT(blended, 0);
}

TEST(Rope, NamesThePositionThatIsOutsideTheTable) {
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  const RopeTable table(8, 16, 10000, std::nullopt, ctx);
  Doubles x(2 * 8);
  const std::vector<int32_t> positions{3, 16};
  EXPECT_THROW(
      rope(view_of(x, {2, 1, 8}), view_of(positions, {2}), table, RopeDirection::kForward, stream),
      ShapeError);
  EXPECT_THROW(RopeTable(7, 16, 10000, std::nullopt, ctx), ConfigError);
}

TEST(Segments, CountPositionsFromEachStart) {
  Bench bench;
  Segments segments({0, 2, 5}, bench.ctx);
  const auto ints = [&](const ConstView& v) { return bench.download<int32_t>(v); };
  EXPECT_EQ(ints(segments.starts()), (std::vector<int32_t>{0, 0, 2, 2, 2}));
  EXPECT_EQ(ints(segments.ends()), (std::vector<int32_t>{2, 2, 5, 5, 5}));
  EXPECT_EQ(ints(segments.positions()), (std::vector<int32_t>{0, 1, 0, 1, 2}));
  EXPECT_EQ(segments.longest(), 3);
  const void* address = segments.starts().data;
  segments.assign({0, 4, 5}, bench.stream);
  EXPECT_EQ(segments.starts().data, address);
  EXPECT_EQ(ints(segments.positions()), (std::vector<int32_t>{0, 1, 2, 3, 0}));
  EXPECT_EQ(segments.longest(), 4);
}

TEST(Segments, RefusesBoundsThatDoNotAscend) {
  Bench bench;
  EXPECT_THROW(Segments({}, bench.ctx), ShapeError);
  EXPECT_THROW(Segments({0}, bench.ctx), ShapeError);
  EXPECT_THROW(Segments({1, 5}, bench.ctx), ShapeError);
  EXPECT_THROW(Segments({0, 3, 3, 5}, bench.ctx), ShapeError);
  Segments segments({0, 5}, bench.ctx);
  EXPECT_THROW(segments.assign({0, 4}, bench.stream), ShapeError);
  EXPECT_EQ(segments.tokens(), 5);
}

}  // namespace
}  // namespace rowshard
