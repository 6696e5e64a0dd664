#include "layers/norm.h"

#include "fused_codes.h"
#include "layer_test.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

constexpr double kEps = 1e-5;

Norm norm_of(NormKind kind, const ConstView& weight, const ConstView& bias = {}) {
  return {.kind = kind, .weight = weight, .bias = bias, .eps = kEps};
}

struct Reference {
  NormKind kind;
  int64_t rows, width;
  Doubles x, weight, bias, dy, y, statistics, dx, dweight, dbias;

  Reference(NormKind kind_, int64_t rows_, int64_t width_)
      : kind(kind_), rows(rows_), width(width_) {
    x = testing::random_values(rows * width, 1);
    for (int64_t i = 0; i < rows * width; ++i)
      x[i] =
          (x[i] + 0.25) * static_cast<double>(1 + i / width);  // every row its magnitude and mean
    weight = testing::random_values(width, 2);
    bias = testing::random_values(width, 4);
    dy = testing::random_values(rows * width, 3);
  }
  Shape shape() const { return {rows, width}; }
  Shape statistics_shape() const { return norm_statistics_shape(kind, rows); }
  Norm norm() const {
    const bool layer = kind == NormKind::kLayer;
    return norm_of(kind, view_of(weight, {width}), layer ? view_of(bias, {width}) : ConstView());
  }
  void forward() {
    y.assign(rows * width, NAN);
    statistics.assign(statistics_shape().elements(), NAN);
    Stream stream(kHost);
    norm_forward(view_of(y, shape()), nullptr, view_of(statistics, statistics_shape()),
                 view_of(std::as_const(x), shape()), norm(), stream);
  }
  void backward() {
    Arena arena(kHost);
    Stream stream(kHost);
    Context ctx{arena, stream};
    dx.assign(rows * width, NAN);
    dweight.assign(width, 0);
    dbias.assign(width, 0);
    NormGradients gradients{.weight = view_of(dweight, {width})};
    if (kind == NormKind::kLayer)
      gradients.bias = view_of(dbias, {width});
    norm_backward(view_of(dx, shape()), view_of(std::as_const(dy), shape()),
                  view_of(std::as_const(x), shape()), norm(),
                  view_of(std::as_const(statistics), statistics_shape()), false, gradients, ctx);
  }
};

TEST(RmsNorm, GivesRowsOfUnitMeanSquareTimesWeight) {
  Reference r(NormKind::kRms, 3, 10);
  r.forward();
  for (int64_t row = 0; row < 3; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < 10; ++i)
      squares += std::pow(r.x[row * 10 + i], 2);
    const double rstd = 1 / std::sqrt(squares / 10 + kEps);
    EXPECT_NEAR(r.statistics[row], rstd, 1e-14 * rstd);
    for (int64_t i = 0; i < 10; ++i) {
      EXPECT_NEAR(r.y[row * 10 + i], r.x[row * 10 + i] * rstd * r.weight[i], 1e-13);
    }
  }
}

TEST(LayerNorm, GivesRowsOfMeanZeroAndUnitVarianceTimesWeightPlusBias) {
  Reference r(NormKind::kLayer, 3, 10);
  r.forward();
  for (int64_t row = 0; row < 3; ++row) {
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < 10; ++i)
      mean += r.x[row * 10 + i] / 10;
    for (int64_t i = 0; i < 10; ++i)
      squares += std::pow(r.x[row * 10 + i] - mean, 2);
    const double rstd = 1 / std::sqrt(squares / 10 + kEps);
    EXPECT_NEAR(r.statistics[row], mean, 1e-14);
    EXPECT_NEAR(r.statistics[3 + row], rstd, 1e-14 * rstd);
    for (int64_t i = 0; i < 10; ++i) {
      const double n = (r.x[row * 10 + i] - mean) * rstd;
      EXPECT_NEAR(r.y[row * 10 + i], n * r.weight[i] + r.bias[i], 1e-13);
    }
  }
}

TEST(Norms, BackwardAgreesWithFiniteDifferences) {
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
    SCOPED_TRACE(to_string(kind));
    Reference r(kind, 3, 10);
    const auto loss = [&] {
      r.forward();
      return testing::dot(r.y, r.dy);
    };
    loss();
    r.backward();
    const Doubles dx = r.dx, dweight = r.dweight, dbias = r.dbias;
    testing::expect_gradient(r.x, dx, loss);
    testing::expect_gradient(r.weight, dweight, loss);
    if (kind == NormKind::kLayer)
      testing::expect_gradient(r.bias, dbias, loss);
  }
}

TEST(RmsNorm, RefusesOperandsThatDoNotFit) {
  Reference r(NormKind::kRms, 3, 10);
  Doubles y(30), rstd(3);
  Stream stream(kHost);
  const View to = view_of(y, {3, 10}), statistics = view_of(rstd, {3}), x = view_of(r.x, {3, 10});
  const ConstView weight = view_of(r.weight, {10});
  EXPECT_THROW(norm_forward(to, nullptr, statistics, x,
                            norm_of(NormKind::kRms, weight.slice_rows(0, 9)), stream),
               ShapeError);
  EXPECT_THROW(norm_forward(to, nullptr, statistics, x, norm_of(NormKind::kLayer, weight), stream),
               ShapeError)
      << "LayerNorm needs two statistics a row";
  EXPECT_THROW(
      norm_forward(to, nullptr, statistics, x, norm_of(NormKind::kRms, weight, weight), stream),
      ShapeError)
      << "RMSNorm has no bias";
  EXPECT_THROW(
      norm_forward(View(), nullptr, statistics, x, norm_of(NormKind::kRms, weight), stream),
      LogicError);
}

template <typename T>
class NormOnDevice : public ::testing::Test {};
using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(NormOnDevice, Types);

// Widths below, at and above what one block of threads takes at once, and one that is odd.
TYPED_TEST(NormOnDevice, StaysWithinRoundingOfF64) {
  using T = TypeParam;
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
    for (int64_t width : {64, 576, 1001, 4096}) {
      SCOPED_TRACE(message(to_string(kind), " ", width));
      const bool layer = kind == NormKind::kLayer;
      Reference r(kind, 37, width);
      for (Doubles* values : {&r.x, &r.weight, &r.bias, &r.dy})
        *values = testing::representable<T>(*values);
      r.forward();
      r.backward();
      Bench bench;
      const Tensor x = bench.upload(testing::narrowed<T>(r.x), r.shape());
      const Tensor weight = bench.upload(testing::narrowed<T>(r.weight), {width});
      const Tensor bias = bench.upload(testing::narrowed<T>(r.bias), {width});
      const Tensor dy = bench.upload(testing::narrowed<T>(r.dy), r.shape());
      const Tensor y = bench.upload(std::vector<T>(r.x.size(), T(7.f)), r.shape());
      const Tensor statistics = bench.upload(
          std::vector<float>(r.statistics_shape().elements(), NAN), r.statistics_shape());
      const Norm norm = norm_of(kind, weight, layer ? ConstView(bias) : ConstView());
      norm_forward(y, nullptr, statistics, x, norm, bench.stream);
      // Two roundings to T; f32 sums of `width` squares are far below that in bf16. A bias can
      // cancel the rest of an element.
      const double rounding = testing::kRounding<T>, sum = 1e-6;
      testing::expect_close(testing::widened(bench.download<T>(y)), r.y, layer ? 2e-5 : 0,
                            2 * rounding + sum);
      testing::expect_close(testing::widened(bench.download<float>(statistics)), r.statistics,
                            layer ? 1e-6 * testing::largest(r.x) : 0, sum);

      const Tensor dx = bench.upload(std::vector<T>(r.x.size(), T(7.f)), r.shape());
      const Tensor dweight = bench.upload(std::vector<float>(width, 0.5f), {width});
      const Tensor dbias = bench.upload(std::vector<float>(width, 0.5f), {width});
      NormGradients gradients{.weight = dweight};
      if (layer)
        gradients.bias = dbias;
      norm_backward(dx, dy, x, norm, statistics, false, gradients, bench.ctx);
      testing::expect_close(testing::widened(bench.download<T>(dx)), r.dx, 1e-5, rounding + 1e-5);
      const auto expect_added = [&](const Tensor& got, Doubles want) {
        for (double& value : want)
          value += 0.5;
        testing::expect_close(testing::widened(bench.download<float>(got)), want, 1e-4, 1e-5);
      };
      expect_added(dweight, r.dweight);
      expect_added(dbias, layer ? r.dbias : Doubles(width, 0));

      // Accumulating adds to what is there, and no gradient of the norm is asked for.
      const Tensor residual = bench.upload(testing::narrowed<T>(r.dy), r.shape());
      norm_backward(residual, dy, x, norm, statistics, true, {}, bench.ctx);
      Doubles expected = r.dx;
      for (size_t i = 0; i < expected.size(); ++i)
        expected[i] += r.dy[i];
      testing::expect_close(testing::widened(bench.download<T>(residual)), expected, 1e-5,
                            rounding + 1e-5);
    }
  }
}

// Codes from the norm's kernel are the bytes that the quantiser makes of its result, padding of the
// scales included, with and without the result itself.
TYPED_TEST(NormOnDevice, FusedCodesAreTheQuantisersBytes) {
  using T = TypeParam;
  Bench bench;
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
    for (const auto& [rows, width] :
         {std::pair<int64_t, int64_t>{5, 64}, {37, 576}, {3, 1001}, {8, 4096}}) {
      SCOPED_TRACE(message(to_string(kind), " ", rows, " ", width));
      const Tensor x = bench.upload(
          testing::narrowed<T>(testing::groups_of_magnitudes(rows, width)), {rows, width});
      const Tensor weight =
          bench.upload(testing::narrowed<T>(testing::random_values(width, 2)), {width});
      const Tensor statistics = bench.arena.tensor(Category::kActivations, "test", DType::kF32,
                                                   norm_statistics_shape(kind, rows));
      testing::expect_fused_codes(
          bench, DTypeOf<T>::value, rows, width, [&](const View& y, const Fp8View* codes) {
            norm_forward(y, codes, statistics, x, norm_of(kind, weight), bench.stream);
          });
    }
  }
}

// The order of roundings of Hugging Face: cast to bf16 first, then multiply by the weight.
TEST(RmsNorm, RoundsBeforeTheWeight) {
  Bench bench;
  const int64_t width = 256;
  std::vector<bf16> x = testing::narrowed<bf16>(testing::random_values(width, 5));
  std::vector<bf16> weight = testing::narrowed<bf16>(testing::random_values(width, 6));
  const Tensor xt = bench.upload(x, {1, width}), wt = bench.upload(weight, {width});
  const Tensor y = bench.upload(x, {1, width});
  const Tensor rstd = bench.upload(std::vector<float>{0}, {1});
  norm_forward(y, nullptr, rstd, xt, norm_of(NormKind::kRms, wt), bench.stream);
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
