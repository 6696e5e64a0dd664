#include "layers/rms_norm.h"

#include "layer_test.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

constexpr double kEps = 1e-5;

struct Reference {
  int64_t rows, width;
  Doubles x, weight, dy, y, rstd, dx, dweight;

  Reference(int64_t rows_, int64_t width_) : rows(rows_), width(width_) {
    x = testing::random_values(rows * width, 1);
    for (int64_t i = 0; i < rows * width; ++i)
      x[i] *= 1 + i / width;  // every row its magnitude
    weight = testing::random_values(width, 2);
    dy = testing::random_values(rows * width, 3);
  }
  Shape shape() const { return {rows, width}; }
  void forward() {
    y.assign(rows * width, NAN);
    rstd.assign(rows, NAN);
    Stream stream(kHost);
    rms_norm(view_of(y, shape()), view_of(rstd, {rows}), view_of(std::as_const(x), shape()),
             view_of(std::as_const(weight), {width}), kEps, stream);
  }
  void backward() {
    Arena arena(kHost);
    Stream stream(kHost);
    Context ctx{arena, stream};
    dx.assign(rows * width, NAN);
    dweight.assign(width, 0);
    rms_norm_backward(view_of(dx, shape()), view_of(std::as_const(dy), shape()),
                      view_of(std::as_const(x), shape()), view_of(std::as_const(weight), {width}),
                      view_of(std::as_const(rstd), {rows}), false, view_of(dweight, {width}), ctx);
  }
};

TEST(RmsNorm, GivesRowsOfUnitMeanSquareTimesWeight) {
  Reference r(3, 10);
  r.forward();
  for (int64_t row = 0; row < 3; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < 10; ++i)
      squares += std::pow(r.x[row * 10 + i], 2);
    const double rstd = 1 / std::sqrt(squares / 10 + kEps);
    EXPECT_NEAR(r.rstd[row], rstd, 1e-14 * rstd);
    for (int64_t i = 0; i < 10; ++i) {
      EXPECT_NEAR(r.y[row * 10 + i], r.x[row * 10 + i] * rstd * r.weight[i], 1e-13);
    }
  }
}

TEST(RmsNorm, BackwardAgreesWithFiniteDifferences) {
  Reference r(3, 10);
  const auto loss = [&] {
    r.forward();
    return testing::dot(r.y, r.dy);
  };
  loss();
  r.backward();
  const Doubles dx = r.dx, dweight = r.dweight;
  testing::expect_gradient(r.x, dx, loss);
  testing::expect_gradient(r.weight, dweight, loss);
}

TEST(RmsNorm, RefusesOperandsThatDoNotFit) {
  Reference r(3, 10);
  Doubles y(30), rstd(3);
  Stream stream(kHost);
  EXPECT_THROW(rms_norm(view_of(y, {3, 10}), view_of(rstd, {3}), view_of(r.x, {3, 10}),
                        view_of(r.weight, {10}).slice_rows(0, 9), kEps, stream),
               ShapeError);
}

template <typename T>
class RmsNormOnDevice : public ::testing::Test {};
using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(RmsNormOnDevice, Types);

// Widths below, at and above what one block of threads takes at once, and one that is odd.
TYPED_TEST(RmsNormOnDevice, StaysWithinRoundingOfF64) {
  using T = TypeParam;
  for (int64_t width : {64, 576, 1001, 4096}) {
    SCOPED_TRACE(width);
    Reference r(37, width);
    r.x = testing::representable<T>(r.x);
    r.weight = testing::representable<T>(r.weight);
    r.dy = testing::representable<T>(r.dy);
    r.forward();
    r.backward();
    Bench bench;
    const Tensor x = bench.upload(testing::narrowed<T>(r.x), r.shape());
    const Tensor weight = bench.upload(testing::narrowed<T>(r.weight), {width});
    const Tensor dy = bench.upload(testing::narrowed<T>(r.dy), r.shape());
    const Tensor y = bench.upload(std::vector<T>(r.x.size(), T(7.f)), r.shape());
    const Tensor rstd = bench.upload(std::vector<float>(37, NAN), {37});
    rms_norm(y, rstd, x, weight, kEps, bench.stream);
    // Two roundings to T; f32 sums of `width` squares are far below that in bf16.
    const double rounding = testing::kRounding<T>, sum = 1e-6;
    testing::expect_close(testing::widened(bench.download<T>(y)), r.y, 0, 2 * rounding + sum);
    testing::expect_close(testing::widened(bench.download<float>(rstd)), r.rstd, 0, sum);

    Bench fresh;
    const Tensor dx = bench.upload(std::vector<T>(r.x.size(), T(7.f)), r.shape());
    Tensor dweight = bench.upload(std::vector<float>(width, 0.5f), {width});
    rms_norm_backward(dx, dy, x, weight, rstd, false, dweight, bench.ctx);
    const Doubles got = testing::widened(bench.download<T>(dx));
    testing::expect_close(got, r.dx, 1e-5, rounding + 1e-5);
    Doubles expected = r.dweight;
    for (double& value : expected)
      value += 0.5;
    testing::expect_close(testing::widened(bench.download<float>(dweight)), expected, 1e-4, 1e-5);

    // Accumulating adds to what is there, and no dweight is asked for.
    const Tensor residual = bench.upload(testing::narrowed<T>(r.dy), r.shape());
    rms_norm_backward(residual, dy, x, weight, rstd, true, View{}, bench.ctx);
    expected = r.dx;
    for (size_t i = 0; i < expected.size(); ++i)
      expected[i] += r.dy[i];
    testing::expect_close(testing::widened(bench.download<T>(residual)), expected, 1e-5,
                          rounding + 1e-5);
  }
}

// The order of roundings of Hugging Face: cast to bf16 first, then multiply by the weight.
TEST(RmsNormOnDevice, RoundsBeforeTheWeight) {
  Bench bench;
  const int64_t width = 256;
  std::vector<bf16> x = testing::narrowed<bf16>(testing::random_values(width, 5));
  std::vector<bf16> weight = testing::narrowed<bf16>(testing::random_values(width, 6));
  const Tensor xt = bench.upload(x, {1, width}), wt = bench.upload(weight, {width});
  const Tensor y = bench.upload(x, {1, width});
  const Tensor rstd = bench.upload(std::vector<float>{0}, {1});
  rms_norm(y, rstd, xt, wt, kEps, bench.stream);
  const float r = bench.download<float>(rstd)[0];
  const std::vector<bf16> got = bench.download<bf16>(y);
  int differs = 0;
  for (int64_t i = 0; i < width; ++i) {
    const bf16 normed(static_cast<float>(x[i]) * r);
    const bf16 expected(static_cast<float>(normed) * static_cast<float>(weight[i]));
    EXPECT_EQ(got[i].bits, expected.bits) << i;
    const bf16 once(static_cast<float>(x[i]) * r * static_cast<float>(weight[i]));
    differs += once.bits != expected.bits;
  }
  EXPECT_GT(differs, 0) << "the data cannot tell the two orders apart";
}

}  // namespace
}  // namespace rowshard
