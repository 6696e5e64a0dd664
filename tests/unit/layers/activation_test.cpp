// SwiGLU, GeGLU, GELU, embedding, cross entropy, and the exp they stand on.
#include <limits>

#include "fused_codes.h"
#include "layer_test.h"
#include "layers/activation.h"
#include "layers/cross_entropy.h"
#include "layers/embedding.h"
#include "layers/host_math.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

TEST(FastExp, IsWithinTwoUnitsOfTheLastPlace) {
  double worst = 0;
  // Every 977th float there is: all exponents, both signs, subnormals.
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 977) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(x))
      continue;
    const double exact = std::exp(static_cast<double>(x));
    const float got = host::fast_exp(x);
    const float nearest = static_cast<float>(exact);
    if (std::isinf(nearest)) {
      ASSERT_EQ(got, nearest) << x;
      continue;
    }
    const double unit = std::nextafter(nearest, INFINITY) - static_cast<double>(nearest);
    worst = std::max(worst, std::abs(got - exact) / unit);
  }
  EXPECT_LE(worst, 2);
  EXPECT_EQ(host::fast_exp(0.0f), 1.0f);
  EXPECT_EQ(host::fast_exp(-INFINITY), 0.0f);
  EXPECT_TRUE(std::isnan(host::fast_exp(NAN)));
  EXPECT_TRUE(std::isnan(host::fast_exp(-NAN)));
}

constexpr Activation kActivations[] = {Activation::kSwiGlu, Activation::kGeGlu, Activation::kGelu};

/// `view` where the activation is gated, nothing where it is not.
View if_gated(Activation activation, const View& view) {
  return is_gated(activation) ? view : View();
}

TEST(Activations, BackwardAgreesWithFiniteDifferences) {
  const Shape shape{5, 7};
  for (const Activation activation : kActivations) {
    SCOPED_TRACE(to_string(activation));
    Doubles gate = testing::random_values(35, 1, 2), up = testing::random_values(35, 2);
    const Doubles dy = testing::random_values(35, 3);
    Doubles y(35), dgate(35), dup(35);
    Stream stream(kHost);
    const auto loss = [&] {
      activation_forward(view_of(y, shape), nullptr, view_of(gate, shape),
                         if_gated(activation, view_of(up, shape)), activation, stream);
      return testing::dot(y, dy);
    };
    activation_backward(view_of(dgate, shape), if_gated(activation, view_of(dup, shape)),
                        view_of(dy, shape), view_of(gate, shape),
                        if_gated(activation, view_of(up, shape)), activation, stream);
    testing::expect_gradient(gate, dgate, loss);
    if (is_gated(activation))
      testing::expect_gradient(up, dup, loss);
  }
}

// The tanh form, by its definition.
TEST(Activations, GeluIsTheTanhForm) {
  Doubles x = testing::random_values(101, 1, 3), y(101);
  Stream stream(kHost);
  activation_forward(view_of(y, {1, 101}), nullptr, view_of(x, {1, 101}), {}, Activation::kGelu,
                     stream);
  for (size_t i = 0; i < x.size(); ++i) {
    const double inner = std::sqrt(2 / M_PI) * (x[i] + 0.044715 * std::pow(x[i], 3));
    EXPECT_NEAR(y[i], 0.5 * x[i] * (1 + std::tanh(inner)), 1e-12) << x[i];
  }
}

TEST(Activations, RefuseOperandsThatDoNotFit) {
  Doubles x(6), y(6);
  Stream stream(kHost);
  const View gate = view_of(x, {2, 3}), to = view_of(y, {2, 3});
  EXPECT_THROW(activation_forward(to, nullptr, gate, gate, Activation::kGelu, stream), ShapeError);
  EXPECT_THROW(activation_forward(to, nullptr, gate, {}, Activation::kSwiGlu, stream), ShapeError);
  EXPECT_THROW(activation_forward(View(), nullptr, gate, gate, Activation::kSwiGlu, stream),
               LogicError);
}

template <typename T>
class ActivationOnDevice : public ::testing::Test {};
using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(ActivationOnDevice, Types);

TYPED_TEST(ActivationOnDevice, StayWithinRoundingOfF64) {
  using T = TypeParam;
  for (const Activation activation : kActivations) {
    SCOPED_TRACE(to_string(activation));
    Bench bench;
    const Shape shape{13, 331};
    const int64_t count = 13 * 331;
    Doubles gate = testing::random_values(count, 1, activation == Activation::kSwiGlu ? 8 : 3);
    gate[0] = 100;  // the identity, then 0: exp overflows or underflows on the way
    gate[1] = -100;
    gate = testing::representable<T>(gate);
    Doubles up = testing::representable<T>(testing::random_values(count, 2));
    const Doubles dy = testing::representable<T>(testing::random_values(count, 3));
    Doubles y(count), dgate(count), dup(count);
    Stream host_stream(kHost);
    const View up_view = if_gated(activation, view_of(up, shape));
    activation_forward(view_of(y, shape), nullptr, view_of(gate, shape), up_view, activation,
                       host_stream);
    activation_backward(view_of(dgate, shape), if_gated(activation, view_of(dup, shape)),
                        view_of(dy, shape), view_of(gate, shape), up_view, activation, host_stream);
    const Tensor g = bench.upload(testing::narrowed<T>(gate), shape);
    const Tensor u = bench.upload(testing::narrowed<T>(up), shape);
    const Tensor d = bench.upload(testing::narrowed<T>(dy), shape);
    const Tensor result = bench.upload(std::vector<T>(count, T(7.f)), shape);
    const View second = if_gated(activation, u);
    activation_forward(result, nullptr, g, second, activation, bench.stream);
    // exp of an argument of a few tens carries its relative error into the tails of gelu.
    const double rounding = testing::kRounding<T> + 2e-6;
    testing::expect_close(testing::widened(bench.download<T>(result)), y, 1e-6, rounding);
    // In place: dgate over gate, dup over up.
    activation_backward(g, second, d, g, second, activation, bench.stream);
    testing::expect_close(testing::widened(bench.download<T>(g)), dgate, 1e-5, rounding);
    if (is_gated(activation))
      testing::expect_close(testing::widened(bench.download<T>(u)), dup, 1e-6, rounding);
  }
}

// Codes from the activation's kernel are the bytes that the quantiser makes of its result.
TYPED_TEST(ActivationOnDevice, FusedCodesAreTheQuantisersBytes) {
  using T = TypeParam;
  Bench bench;
  for (const Activation activation : kActivations) {
    for (const auto& [rows, width] :
         {std::pair<int64_t, int64_t>{5, 64}, {37, 576}, {3, 1001}, {9, 2048}}) {
      SCOPED_TRACE(message(to_string(activation), " ", rows, " ", width));
      const Tensor gate = bench.upload(
          testing::narrowed<T>(testing::groups_of_magnitudes(rows, width)), {rows, width});
      const Tensor up = bench.upload(testing::narrowed<T>(testing::random_values(rows * width, 2)),
                                     {rows, width});
      testing::expect_fused_codes(
          bench, DTypeOf<T>::value, rows, width, [&](const View& y, const Fp8View* codes) {
            activation_forward(y, codes, gate, if_gated(activation, up), activation, bench.stream);
          });
    }
  }
}

TYPED_TEST(ActivationOnDevice, EmbeddingCopiesRowsExactly) {
  using T = TypeParam;
  Bench bench;
  const int64_t vocabulary = 11, width = 37;
  const std::vector<T> table = testing::narrowed<T>(testing::random_values(vocabulary * width, 1));
  const std::vector<int32_t> ids{10, 0, 3, 3, 7};
  const Tensor t = bench.upload(table, {vocabulary, width});
  const Tensor i = bench.upload(ids, {5});
  Doubles expected;
  for (int32_t id : ids) {
    for (int64_t c = 0; c < width; ++c)
      expected.push_back(widen(table[id * width + c]));
  }
  const Tensor y = bench.arena.tensor(Category::kActivations, "y", DTypeOf<T>::value, {5, width});
  embedding_lookup(y, t, i, bench.stream);
  EXPECT_EQ(testing::widened(bench.download<T>(y)), expected);
  const Tensor wide = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {5, width});
  embedding_lookup(wide, t, i, bench.stream);
  EXPECT_EQ(testing::widened(bench.download<float>(wide)), expected);
}

TEST(Embedding, NamesTheIdThatIsOutside) {
  const std::vector<int32_t> ids{1, 2, 11};
  try {
    check_ids(ids, 11);
    FAIL() << "no exception";
  } catch (const ShapeError& error) {
    EXPECT_NE(std::string(error.what()).find("11 at place 2"), std::string::npos) << error.what();
  }
  EXPECT_THROW(check_ids(std::vector<int32_t>{-1}, 11), ShapeError);
  EXPECT_NO_THROW(check_ids(std::vector<int32_t>{0, 10}, 11));
}

double loss_of(Doubles logits, const std::vector<int32_t>& labels, int64_t width, double scale,
               Doubles* gradient) {
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  const int64_t rows = labels.size();
  Doubles sum{0};
  cross_entropy(view_of(sum, {1}), view_of(logits, {rows, width}), view_of(labels, {rows}), scale,
                ctx);
  if (gradient)
    *gradient = logits;
  return sum[0] * scale;
}

TEST(CrossEntropy, GradientAgreesWithFiniteDifferences) {
  const std::vector<int32_t> labels{3, 0, 12};
  Doubles logits = testing::random_values(3 * 13, 1, 2);
  Doubles gradient;
  loss_of(logits, labels, 13, 1.0 / 3, &gradient);
  testing::expect_gradient(logits, gradient,
                           [&] { return loss_of(logits, labels, 13, 1.0 / 3, nullptr); });
}

TEST(CrossEntropy, OfEqualLogitsIsTheLogOfTheVocabulary) {
  Doubles logits(2 * 50, 3.0);
  EXPECT_NEAR(loss_of(logits, {0, 49}, 50, 0.5, nullptr), std::log(50.0), 1e-12);
}

TYPED_TEST(ActivationOnDevice, CrossEntropyStaysNearF64) {
  using T = TypeParam;
  Bench bench;
  // The odd width is no multiple of any vector; the large one is a real vocabulary.
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{33, 1001}, {3, 49152}}) {
    SCOPED_TRACE(width);
    Doubles logits = testing::random_values(rows * width, 1, 3);
    for (int64_t i = 0; i < rows * width; ++i)
      logits[i] += 40.0 * (i / width % 5);  // row by row
    logits = testing::representable<T>(logits);
    std::vector<int32_t> labels;
    for (int64_t i = 0; i < rows; ++i)
      labels.push_back((i * 977 + width - 1) % width);
    const double scale = 1.0 / rows;
    Doubles gradient;
    const double expected = loss_of(logits, labels, width, scale, &gradient) / scale;

    const Tensor z = bench.upload(testing::narrowed<T>(logits), {rows, width});
    const Tensor l = bench.upload(labels, {rows});
    const Tensor losses = bench.upload(std::vector<float>(rows, NAN), {rows});
    token_losses(losses, z, l, bench.stream);
    const std::vector<float> per_token = bench.download<float>(losses);
    const Tensor sum = bench.upload(Doubles{10}, {1});  // what earlier chunks have left
    cross_entropy(sum, z, l, scale, bench.ctx);
    EXPECT_NEAR(bench.download<double>(sum)[0], 10 + expected, 2e-6 * expected);
    double total = 0;
    for (float loss : per_token)
      total += loss;
    EXPECT_NEAR(total, expected, 2e-6 * expected);
    // Probabilities are at most `scale`; one rounding to T, and f32 exponentials.
    testing::expect_close(testing::widened(bench.download<T>(z)), gradient, 1e-6 * scale,
                          testing::kRounding<T> + 1e-5);
  }
}

// A graph's replays take the scale from where it lies.
TEST(CrossEntropy, TheScaleMayLieOnTheDevice) {
  Bench bench;
  const auto gradient = [&](Argument<double> scale) {
    std::vector<float> logits;
    for (int i = 0; i < 2 * 50; ++i)
      logits.push_back(0.125f * static_cast<float>(i * 37 % 101));
    const Tensor z = bench.upload(logits, {2, 50});
    const Tensor l = bench.upload(std::vector<int32_t>{49, 3}, {2});
    const Tensor sum = bench.upload(Doubles{0}, {1});
    cross_entropy(sum, z, l, scale, bench.ctx);
    return bench.download<float>(z);
  };
  const double thirds[] = {1.0 / 3, 2.0 / 3};
  const Tensor scale = bench.upload(Doubles(thirds, thirds + 1), {1});
  const auto there = Argument<double>::at(scale.as<double>());
  EXPECT_EQ(gradient(there), gradient(thirds[0]));
  copy(scale, ConstView(&thirds[1], DType::kF64, {1}, kHost), bench.stream);
  EXPECT_EQ(gradient(there), gradient(thirds[1]));
  EXPECT_NE(gradient(there), gradient(thirds[0]));
}

TYPED_TEST(ActivationOnDevice, ARowThatOnlyMakesUpTheNumberAddsNothing) {
  using T = TypeParam;
  Bench bench;
  for (const int64_t width : {51, 4096}) {
    const std::vector<T> logits = testing::narrowed<T>(testing::random_values(3 * width, 1, 3));
    const auto run = [&](const std::vector<int32_t>& labels) {
      const auto rows = static_cast<int64_t>(labels.size());
      const Tensor z = bench.upload(std::vector<T>(logits.begin(), logits.begin() + rows * width),
                                    {rows, width});
      const Tensor l = bench.upload(labels, {rows});
      const Tensor losses = bench.upload(std::vector<float>(rows, NAN), {rows});
      token_losses(losses, z, l, bench.stream);
      const Tensor sum = bench.upload(Doubles{10}, {1});
      cross_entropy(sum, z, l, 0.5, bench.ctx);
      return std::tuple(testing::widened(bench.download<T>(z)), bench.download<float>(losses),
                        bench.download<double>(sum)[0]);
    };
    auto [gradient, losses, sum] = run({7, 49, kNoLoss});
    EXPECT_EQ(losses[2], 0);
    EXPECT_EQ(Doubles(gradient.begin() + 2 * width, gradient.end()), Doubles(width, 0.0));
    gradient.resize(2 * width);
    losses.resize(2);
    EXPECT_EQ(std::tuple(gradient, losses, sum), run({7, 49}));
  }
}

TEST(CrossEntropy, NoRowsAddNothing) {
  Bench bench;
  const Tensor sum = bench.upload(Doubles{10}, {1});
  Tensor z = bench.arena.tensor(Category::kActivations, "z", DType::kF32, {0, 50});
  Tensor l = bench.arena.tensor(Category::kActivations, "l", DType::kI32, {0});
  cross_entropy(sum, z, l, 1, bench.ctx);
  EXPECT_EQ(bench.download<double>(sum)[0], 10);
}

TEST(CrossEntropy, ALabelOutsideTheVocabularyDoesNotPass) {
  Bench bench;
  for (int32_t label : {-100, -2, 50}) {
    const Tensor z = bench.upload(std::vector<float>(50, 1), {1, 50});
    const Tensor l = bench.upload(std::vector<int32_t>{label}, {1});
    const Tensor losses = bench.upload(std::vector<float>{0}, {1});
    if (testing::test_device.is_host()) {
      EXPECT_THROW(token_losses(losses, z, l, bench.stream), ShapeError);
    } else {
      token_losses(losses, z, l, bench.stream);
      EXPECT_TRUE(std::isnan(bench.download<float>(losses)[0]));
    }
  }
}

}  // namespace
}  // namespace rowshard
