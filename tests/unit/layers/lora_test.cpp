#include "layers/lora.h"

#include "layer_test.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

constexpr int64_t kTokens = 5, kInputs = 7, kOutputs = 6, kRank = 3;

// An adapter in f64 whose loss is Σ y · dy.
struct Adapter {
  Doubles a = testing::random_values(kRank * kInputs, 1);
  Doubles b = testing::random_values(kOutputs * kRank, 2);
  Doubles x = testing::random_values(kTokens * kInputs, 3);
  Doubles dy = testing::random_values(kTokens * kOutputs, 4);
  Doubles grad_a = Doubles(kRank * kInputs, 0), grad_b = Doubles(kOutputs * kRank, 0);
  Doubles dx = Doubles(kTokens * kInputs, 0);
  Dropout dropout;
  Arena arena{kHost};
  Stream stream{kHost};
  Context ctx{arena, stream};
  LoraSaved saved;

  LoraFactors factors() {
    return {view_of(a, {kRank, kInputs}), view_of(b, {kOutputs, kRank}),
            view_of(grad_a, {kRank, kInputs}), view_of(grad_b, {kOutputs, kRank}), 0.5f};
  }
  double loss() {
    Doubles y(kTokens * kOutputs, 0);
    lora_forward(view_of(y, {kTokens, kOutputs}), view_of(x, {kTokens, kInputs}), factors(),
                 dropout, &saved, ctx);
    return testing::dot(y, dy);
  }
  void backward() {
    loss();
    lora_backward(view_of(dx, {kTokens, kInputs}), view_of(dy, {kTokens, kOutputs}),
                  view_of(x, {kTokens, kInputs}), factors(), saved, ctx);
  }
};

TEST(Lora, BackwardAgreesWithFiniteDifferences) {
  for (float rate : {0.0f, 0.4f}) {
    SCOPED_TRACE(rate);
    Adapter adapter;
    adapter.dropout = {rate, Philox{11, 3}, 1000};
    adapter.backward();
    const auto loss = [&] { return adapter.loss(); };
    testing::expect_gradient(adapter.a, adapter.grad_a, loss);
    testing::expect_gradient(adapter.b, adapter.grad_b, loss);
    testing::expect_gradient(adapter.x, adapter.dx, loss);
  }
}

TEST(Lora, GradientsAndOutputsAccumulate) {
  Adapter once, twice;
  once.backward();
  twice.backward();
  twice.backward();
  for (size_t i = 0; i < once.grad_a.size(); ++i) {
    EXPECT_NEAR(twice.grad_a[i], 2 * once.grad_a[i], 1e-12);
  }
  for (size_t i = 0; i < once.dx.size(); ++i)
    EXPECT_NEAR(twice.dx[i], 2 * once.dx[i], 1e-12);
}

TEST(Lora, WithoutDxOnlyTheFactorsGetGradients) {
  Adapter full, factors_only;
  full.backward();
  factors_only.loss();
  lora_backward(View{}, view_of(factors_only.dy, {kTokens, kOutputs}),
                view_of(factors_only.x, {kTokens, kInputs}), factors_only.factors(),
                factors_only.saved, factors_only.ctx);
  EXPECT_EQ(full.grad_a, factors_only.grad_a);
  EXPECT_EQ(full.grad_b, factors_only.grad_b);
}

TEST(Lora, BackwardWithoutForwardIsRefused) {
  Adapter adapter;
  EXPECT_THROW(lora_backward(View{}, view_of(adapter.dy, {kTokens, kOutputs}),
                             view_of(adapter.x, {kTokens, kInputs}), adapter.factors(),
                             adapter.saved, adapter.ctx),
               LogicError);
}

template <typename T>
class LoraOnDevice : public ::testing::Test {};
using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(LoraOnDevice, Types);

// The mask is the one Philox gives for (token, input), whatever the device and wherever the rows
// start: a rank that holds tokens 1000 … 1006 drops what a single rank would have dropped there.
TYPED_TEST(LoraOnDevice, TheMaskDependsOnTheElementOnly) {
  using T = TypeParam;
  Bench bench;
  const int64_t tokens = 7, width = 33;
  const std::vector<T> x = testing::narrowed<T>(testing::random_values(tokens * width, 1));
  const Tensor xt = bench.upload(x, {tokens, width});
  for (int64_t first : {int64_t{0}, int64_t{1001}, int64_t{1} << 40}) {
    SCOPED_TRACE(first);
    const Dropout dropout{0.25f, Philox{9, 4}, first};
    const Tensor y =
        bench.arena.tensor(Category::kActivations, "y", DTypeOf<T>::value, {tokens, width});
    apply_dropout(y, xt, dropout, bench.stream);
    Doubles expected;
    for (int64_t i = 0; i < tokens * width; ++i) {
      const bool dropped = dropout.random.uniform(first * width + i) < 0.25f;
      expected.push_back(dropped ? 0 : widen(narrow<T>(widen(x[i]) * (1 / (1 - 0.25f)))));
    }
    EXPECT_EQ(testing::widened(bench.download<T>(y)), expected);
  }
}

// A graph's replays take the stream from where it lies.
TYPED_TEST(LoraOnDevice, TheMasksStreamMayLieOnTheDevice) {
  using T = TypeParam;
  Bench bench;
  const std::vector<T> ones(12 * 40, narrow<T>(1.0f));
  const auto masked = [&](const Dropout& dropout) {
    const Tensor x = bench.upload(ones, {12, 40});
    apply_dropout(x, x, dropout, bench.stream);
    return testing::widened(bench.download<T>(x));
  };
  const Dropout fixed{0.5f, Philox{9, 1'000'007}, 3};
  Dropout moved = fixed;
  for (const int64_t base : {1'000'000, 7}) {
    const Tensor at = bench.upload(std::vector<int64_t>{base}, {1});
    moved.random.stream = 1'000'007 - base;
    moved.base = Argument<uint64_t>::at(static_cast<const uint64_t*>(at.view().data));
    EXPECT_EQ(masked(moved), masked(fixed));
    moved.random.stream += 1;
    EXPECT_NE(masked(moved), masked(fixed));
  }
}

TYPED_TEST(LoraOnDevice, DropsTheRateAndKeepsTheMean) {
  using T = TypeParam;
  Bench bench;
  const int64_t tokens = 100, width = 1000;
  const Tensor x = bench.upload(std::vector<T>(tokens * width, T(1.f)), {tokens, width});
  apply_dropout(x, x, {0.1f, Philox{1, 2}, 0}, bench.stream);
  int64_t dropped = 0;
  for (double value : testing::widened(bench.download<T>(x)))
    dropped += value == 0;
  // Binomial: 10000 expected, standard deviation 95.
  EXPECT_NEAR(dropped, 10000, 500);
}

TYPED_TEST(LoraOnDevice, StaysNearF64) {
  using T = TypeParam;
  Bench bench;
  const int64_t tokens = 64, inputs = 96, outputs = 160, rank = 16;
  const auto values = [&](int64_t count, uint32_t seed) {
    return testing::representable<T>(testing::random_values(count, seed, 0.5));
  };
  const Doubles a = values(rank * inputs, 1), b = values(outputs * rank, 2);
  const Doubles x = values(tokens * inputs, 3), dy = values(tokens * outputs, 4);
  Doubles y(tokens * outputs, 1), dx(tokens * inputs, 1);
  Doubles grad_a(rank * inputs, 1), grad_b(outputs * rank, 1);
  const Dropout dropout{0.2f, Philox{5, 6}, 10};
  {
    Arena arena(kHost);
    Stream stream(kHost);
    Context ctx{arena, stream};
    LoraSaved saved;
    const LoraFactors factors{view_of(a, {rank, inputs}), view_of(b, {outputs, rank}),
                              view_of(grad_a, {rank, inputs}), view_of(grad_b, {outputs, rank}), 2};
    lora_forward(view_of(y, {tokens, outputs}), view_of(x, {tokens, inputs}), factors, dropout,
                 &saved, ctx);
    lora_backward(view_of(dx, {tokens, inputs}), view_of(dy, {tokens, outputs}),
                  view_of(x, {tokens, inputs}), factors, saved, ctx);
  }
  const auto up = [&](const Doubles& v, Shape shape) {
    return bench.upload(testing::narrowed<T>(v), shape);
  };
  const auto ones = [&](Shape shape) { return up(Doubles(shape.elements(), 1), shape); };
  const Tensor at = up(a, {rank, inputs}), bt = up(b, {outputs, rank});
  const Tensor xt = up(x, {tokens, inputs}), dyt = up(dy, {tokens, outputs});
  const Tensor yt = ones({tokens, outputs}), dxt = ones({tokens, inputs});
  const Tensor ga = bench.upload(std::vector<float>(rank * inputs, 1), {rank, inputs});
  const Tensor gb = bench.upload(std::vector<float>(outputs * rank, 1), {outputs, rank});
  const LoraFactors factors{at, bt, ga, gb, 2};
  LoraSaved saved;
  lora_forward(yt, xt, factors, dropout, &saved, bench.ctx);
  lora_backward(dxt, dyt, xt, factors, saved, bench.ctx);
  // xa, dxa and each result are rounded to T; sums are f32.
  const double rounding = 4 * testing::kRounding<T> + 1e-5;
  const auto close = [&](const Doubles& got, const Doubles& want) {
    testing::expect_close(got, want, rounding * testing::largest(want), rounding);
  };
  close(testing::widened(bench.download<T>(yt)), y);
  close(testing::widened(bench.download<T>(dxt)), dx);
  close(testing::widened(bench.download<float>(ga)), grad_a);
  close(testing::widened(bench.download<float>(gb)), grad_b);
}

TEST(Lora, RefusesARateThatLeavesNothing) {
  Bench bench;
  const Tensor x = bench.upload(std::vector<float>(4), {2, 2});
  EXPECT_THROW(apply_dropout(x, x, {1.0f, Philox{}, 0}, bench.stream), ConfigError);
  EXPECT_THROW(apply_dropout(x, x, {-0.1f, Philox{}, 0}, bench.stream), ConfigError);
}

}  // namespace
}  // namespace rowshard
