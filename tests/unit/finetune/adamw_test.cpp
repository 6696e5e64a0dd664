#include "finetune/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/rng.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;

// Each group of 32 elements has its own magnitude.
std::vector<float> values(int64_t n, uint64_t stream, double scale) {
  const Philox rng{7, stream};
  std::vector<float> x(n);
  for (int64_t i = 0; i < n; ++i) {
    x[i] =
        static_cast<float>(scale * std::exp2(static_cast<double>(i / 32 % 9) - 4) * rng.normal(i));
  }
  return x;
}

// torch.optim.AdamW's loop, in f64.
struct Reference {
  std::vector<double> p, m, v;

  void step(const std::vector<float>& gradients, double scale, const AdamW& h, int64_t step) {
    const double correction1 = 1 - std::pow(h.beta1, step);
    const double correction2 = 1 - std::pow(h.beta2, step);
    for (size_t i = 0; i < p.size(); ++i) {
      const double g = gradients[i] * scale;
      p[i] *= 1 - h.lr * h.weight_decay;
      m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
      v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
      const double denominator = std::sqrt(v[i]) / std::sqrt(correction2) + h.epsilon;
      p[i] -= h.lr / correction1 * m[i] / denominator;
    }
  }
};

class AdamWSizes : public ::testing::TestWithParam<int64_t> {};

// 70001 goes through the threaded loop; 3 and 1 are all tail.
INSTANTIATE_TEST_SUITE_P(Sizes, AdamWSizes, ::testing::Values(1, 3, 256, 1021, 70001));

TEST_P(AdamWSizes, FollowsTheF64LoopOverSteps) {
  const int64_t n = GetParam();
  Bench bench;
  const auto start = values(n, 1, 1.0);
  Tensor p = bench.upload(start, {n});
  Tensor m = bench.upload(std::vector<float>(n, 0.0f), {n});
  Tensor v = bench.upload(std::vector<float>(n, 0.0f), {n});
  Tensor compute = bench.arena.tensor(Category::kAdapter, "compute", DType::kBF16, {n});
  Reference reference{
      {start.begin(), start.end()}, std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)};
  const AdamW hyper{.lr = 1e-2, .weight_decay = 0.1};
  const float scale = 0.37f;
  Tensor factor = bench.upload(std::vector<float>{scale}, {1});
  const int64_t steps = 12;
  for (int64_t step = 1; step <= steps; ++step) {
    const auto g = values(n, 1 + step, 0.01);
    Tensor gradients = bench.upload(g, {n});
    adamw({p, gradients, m, v, compute, factor}, hyper, step, bench.stream);
    bench.stream.synchronize();
    reference.step(g, scale, hyper, step);
  }
  const auto got = bench.download<float>(p), got_m = bench.download<float>(m),
             got_v = bench.download<float>(v);
  const auto got_compute = bench.download<bf16>(compute);
  for (int64_t i = 0; i < n; ++i) {
    // Bound: each step rounds p a few times, and moves it by at most about lr with a relative error
    // of a few ulp in m / sqrt(v).
    const double bound = steps * (2e-7 * std::abs(reference.p[i]) + 4e-6 * hyper.lr);
    ASSERT_NEAR(got[i], reference.p[i], bound) << "p of element " << i;
    ASSERT_NEAR(got_v[i], reference.v[i], 2e-6 * reference.v[i]) << "v of element " << i;
    // m cancels: its error is relative to the gradients it is made of.
    ASSERT_NEAR(got_m[i], reference.m[i], 4e-6 * std::sqrt(reference.v[i] * 1000)) << i;
    ASSERT_EQ(got_compute[i].bits, bf16(got[i]).bits) << "compute copy of element " << i;
  }
}

TEST(AdamW, OneStepByHand) {
  // m = 0.1 g, v = 0.001 g², both corrections cancel: the step is lr · g / (|g| + eps).
  Bench bench;
  Tensor p = bench.upload(std::vector<float>{2.0f, -1.0f}, {2});
  Tensor g = bench.upload(std::vector<float>{0.5f, -4.0f}, {2});
  Tensor m = bench.upload(std::vector<float>{0, 0}, {2});
  Tensor v = bench.upload(std::vector<float>{0, 0}, {2});
  adamw({.parameters = p, .gradients = g, .m = m, .v = v}, {.lr = 0.25, .weight_decay = 0.5}, 1,
        bench.stream);
  const auto got = bench.download<float>(p);
  EXPECT_NEAR(got[0], 2.0 * 0.875 - 0.25, 1e-6);
  EXPECT_NEAR(got[1], -1.0 * 0.875 + 0.25, 1e-6);
  EXPECT_NEAR(bench.download<float>(m)[1], -0.4, 1e-7);
  EXPECT_NEAR(bench.download<float>(v)[1], 0.016, 1e-8);
}

TEST(AdamW, ZeroGradientOnlyDecays) {
  Bench bench;
  Tensor p = bench.upload(std::vector<float>{8.0f}, {1});
  Tensor zero = bench.upload(std::vector<float>{0.0f}, {1});
  Tensor m = bench.upload(std::vector<float>{0.0f}, {1});
  Tensor v = bench.upload(std::vector<float>{0.0f}, {1});
  adamw({.parameters = p, .gradients = zero, .m = m, .v = v}, {.lr = 0.5, .weight_decay = 0.5}, 1,
        bench.stream);
  EXPECT_EQ(bench.download<float>(p)[0], 6.0f);
}

TEST(AdamW, AScaleThatIsNotFiniteChangesNothing) {
  const int64_t n = 37;
  for (float scale :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Bench bench;
    const auto start = values(n, 1, 1.0), start_m = values(n, 2, 0.1);
    const auto start_v = std::vector<float>(n, 0.25f);
    const auto start_compute = std::vector<bf16>(n, bf16(3.0f));
    Tensor p = bench.upload(start, {n});
    Tensor m = bench.upload(start_m, {n});
    Tensor v = bench.upload(start_v, {n});
    Tensor compute = bench.upload(start_compute, {n});
    Tensor g = bench.upload(values(n, 3, 1.0), {n});
    Tensor factor = bench.upload(std::vector<float>{scale}, {1});
    adamw({p, g, m, v, compute, factor}, {.lr = 0.1, .weight_decay = 0.1}, 5, bench.stream);
    EXPECT_EQ(bench.download<float>(p), start);
    EXPECT_EQ(bench.download<float>(m), start_m);
    EXPECT_EQ(bench.download<float>(v), start_v);
    EXPECT_EQ(bench.download<bf16>(compute)[n - 1].bits, bf16(3.0f).bits);
  }
}

// One function computes an element on both devices, so the bits agree. Offset 1 puts every vector
// at an address that 16-byte accesses cannot take.
TEST(AdamW, SameBitsAtAnyAddressAndOnBothDevices) {
  const int64_t n = 1000;
  const auto p0 = values(n, 1, 1.0), g0 = values(n, 2, 0.01), m0 = values(n, 3, 0.01);
  auto v0 = values(n, 4, 0.01);
  for (float& x : v0)
    x = std::abs(x);
  const auto run = [&](Device device, int64_t offset) {
    Arena arena(device);
    Stream stream(device);
    std::vector<Tensor> tensors;
    const auto place = [&](const std::vector<float>& x) {
      tensors.push_back(arena.tensor(Category::kOptimizer, "x", DType::kF32, {n + offset}));
      const View part = tensors.back().view().slice_rows(offset, n);
      copy(part, ConstView(x.data(), DType::kF32, {n}, kHost), stream);
      return part;
    };
    const View p = place(p0), g = place(g0), m = place(m0), v = place(v0);
    adamw({.parameters = p, .gradients = g, .m = m, .v = v}, {.lr = 1e-3, .weight_decay = 0.01}, 7,
          stream);
    std::vector<float> result(n);
    copy(View(result.data(), DType::kF32, {n}, kHost), p, stream);
    stream.synchronize();
    return result;
  };
  const auto host = run(kHost, 0);
  EXPECT_NE(host, p0);
  EXPECT_EQ(run(testing::test_device, 0), host);
  EXPECT_EQ(run(testing::test_device, 1), host);
}

TEST(AdamW, RefusesVectorsThatDoNotFit) {
  Bench bench;
  Tensor p = bench.upload(std::vector<float>(4, 1.0f), {4});
  Tensor g = bench.upload(std::vector<float>(3, 1.0f), {3});
  Tensor m = bench.upload(std::vector<float>(4, 0.0f), {4});
  Tensor v = bench.upload(std::vector<float>(4, 0.0f), {4});
  const AdamW hyper{.lr = 0.1};
  EXPECT_THROW(adamw({.parameters = p, .gradients = g, .m = m, .v = v}, hyper, 1, bench.stream),
               ShapeError);
  EXPECT_THROW(adamw({.parameters = p, .gradients = p, .m = m, .v = v, .compute = g}, hyper, 1,
                     bench.stream),
               ShapeError);
  EXPECT_THROW(adamw({.parameters = p, .gradients = p, .m = m, .v = v}, hyper, 0, bench.stream),
               LogicError);
  EXPECT_THROW(adamw({.parameters = p, .gradients = p, .m = m, .v = v}, {.lr = 0.1, .beta2 = 1}, 1,
                     bench.stream),
               LogicError);
}

// A graph's replays take the step's constants from where they lie.
TEST(AdamW, ConstantsMayLieOnTheDevice) {
  Bench bench;
  const int64_t n = 1003;
  const AdamW hyper{.lr = 1e-3, .weight_decay = 0.01};
  const Tensor g = bench.upload(values(n, 1, 1.0), {n});
  const auto updated = [&](Argument<AdamWConstants> constants) {
    const Tensor p = bench.upload(values(n, 2, 1.0), {n}), m = bench.upload(values(n, 3, 0.1), {n});
    const Tensor v = bench.upload(std::vector<float>(n, 0.5f), {n});
    adamw({.parameters = p, .gradients = g, .m = m, .v = v}, constants, bench.stream);
    return bench.download<float>(p);
  };
  const AdamWConstants third = adamw_constants(hyper, 3), fourth = adamw_constants(hyper, 4);
  const auto size = static_cast<int64_t>(sizeof third);
  const Tensor constants = bench.upload(std::vector<uint8_t>(size), {size});
  const auto there =
      Argument<AdamWConstants>::at(static_cast<const AdamWConstants*>(constants.view().data));
  for (const AdamWConstants& step : {third, fourth}) {
    copy(constants, ConstView(&step, DType::kU8, {size}, kHost), bench.stream);
    EXPECT_EQ(updated(there), updated(step));
  }
  EXPECT_NE(updated(there), updated(third));
}

}  // namespace
}  // namespace rowshard
