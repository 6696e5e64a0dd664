#include "layers/linear.h"

#include "fp8/quantize.h"
#include "layer_test.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

/// y [m, n] = x [m, k] · wᵀ, w [n, k]; with `magnitude`, of the absolute values: the size of what
/// was summed, which bounds the error of the sum.
Doubles product(const Doubles& x, const Doubles& w, int64_t m, int64_t n, int64_t k,
                bool magnitude = false) {
  Doubles y(m * n, 0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t c = 0; c < k; ++c) {
        const double term = x[i * k + c] * w[j * k + c];
        y[i * n + j] += magnitude ? std::abs(term) : term;
      }
    }
  }
  return y;
}

Doubles transposed(const Doubles& x, int64_t rows, int64_t cols) {
  Doubles y(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      y[j * rows + i] = x[i * cols + j];
  }
  return y;
}

TEST(Linear, PlainBackwardAgreesWithFiniteDifferences) {
  const int64_t tokens = 4, k = 6, n = 5, rank = 2;
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  Doubles w = testing::random_values(n * k, 1), bias = testing::random_values(n, 2);
  Doubles x = testing::random_values(tokens * k, 3), dy = testing::random_values(tokens * n, 4);
  Doubles a = testing::random_values(rank * k, 5), b = testing::random_values(n * rank, 6);
  Doubles grad_a(rank * k, 0), grad_b(n * rank, 0), dx(tokens * k, NAN), y(tokens * n, NAN);
  const LinearWeight weight{
      .name = "w", .n = n, .k = k, .plain = view_of(w, {n, k}), .bias = view_of(bias, {n})};
  const LoraFactors lora{view_of(a, {rank, k}), view_of(b, {n, rank}), view_of(grad_a, {rank, k}),
                         view_of(grad_b, {n, rank}), 0.25f};
  LinearSaved saved;
  Doubles grad_w(n * k, 0), grad_bias(n, 0);
  LinearWeight trained = weight;
  trained.gradient = view_of(grad_w, {n, k});
  trained.bias_gradient = view_of(grad_bias, {n});
  const Linear linear{.weight = &trained, .lora = &lora};
  const auto loss = [&] {
    linear_forward(view_of(y, {tokens, n}), view_of(x, {tokens, k}), linear, &saved, ctx);
    return testing::dot(y, dy);
  };
  loss();
  linear_backward(view_of(dx, {tokens, k}), view_of(dy, {tokens, n}), saved, linear, false, ctx);
  testing::expect_gradient(w, grad_w, loss);
  testing::expect_gradient(bias, grad_bias, loss);
  testing::expect_gradient(x, dx, loss);
  testing::expect_gradient(a, grad_a, loss);
  testing::expect_gradient(b, grad_b, loss);
  Doubles expected = product(x, w, tokens, n, k);
  for (int64_t i = 0; i < tokens * n; ++i)
    expected[i] += bias[i % n];
  const Linear frozen{.weight = &weight};
  linear_forward(view_of(y, {tokens, n}), view_of(x, {tokens, k}), frozen, &saved, ctx);
  testing::expect_close(y, expected, 1e-12, 1e-12);
  EXPECT_EQ(saved.input, nullptr) << "a frozen layer without an adapter needs no x";

  const Doubles before = dx;
  linear_backward(view_of(dx, {tokens, k}), view_of(dy, {tokens, n}), saved, frozen, true, ctx);
  const Doubles base = product(dy, transposed(w, n, k), tokens, k, n);
  for (size_t i = 0; i < dx.size(); ++i)
    EXPECT_NEAR(dx[i], before[i] + base[i], 1e-12);
}

TEST(Linear, ABf16WeightServesF32Activations) {
  const int64_t tokens = 8, k = 16, n = 24;
  Bench bench;
  const Doubles w = testing::representable<bf16>(testing::random_values(n * k, 1));
  const Doubles x = testing::representable<float>(testing::random_values(tokens * k, 2));
  const Tensor wt = bench.upload(testing::narrowed<bf16>(w), {n, k});
  const Tensor xt = bench.upload(testing::narrowed<float>(x), {tokens, k});
  const Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {tokens, n});
  const LinearWeight weight{.name = "w", .n = n, .k = k, .plain = wt, .bias = {}};
  linear_forward(y, xt, Linear{.weight = &weight}, nullptr, bench.ctx);
  testing::expect_close(testing::widened(bench.download<float>(y)), product(x, w, tokens, n, k),
                        1e-5, 1e-5);
}

// An FP8 layer on the device under test, and its parts dequantised for an f64 reference.
template <typename T>
struct Fp8Layer {
  int64_t tokens, n, k, rank = 16;
  Bench bench;
  Tensor x, dy, bias, a, b, grad_a, grad_b;
  Fp8Matrix matrix;
  LinearWeight weight;
  Doubles x_values, dy_values, w_values, x8_values, dy8_values, bias_values, a_values, b_values;

  Fp8Layer(int64_t tokens_, int64_t n_, int64_t k_, Grouping grouping = Grouping::k128x128)
      : tokens(tokens_),
        n(n_),
        k(k_),
        matrix("layer.weight", n_, k_, grouping, testing::test_device) {
    // Every 128-tile its own magnitude, so that a scale of another tile shows.
    const auto values = [](int64_t rows, int64_t cols, uint32_t seed, double scale) {
      Doubles v = testing::random_values(rows * cols, seed, scale);
      for (int64_t i = 0; i < rows * cols; ++i) {
        v[i] *= std::exp2((i / cols / 128 * 3 + i % cols / 128) % 5);
      }
      return testing::representable<T>(v);
    };
    x_values = values(tokens, k, 1, 1);
    dy_values = values(tokens, n, 2, 0.1);
    bias_values = values(1, n, 3, 1);
    a_values = values(rank, k, 4, 0.1);
    b_values = values(n, rank, 5, 0.1);
    x = up(x_values, {tokens, k});
    dy = up(dy_values, {tokens, n});
    bias = up(bias_values, {n});
    a = up(a_values, {rank, k});
    b = up(b_values, {n, rank});
    grad_a = bench.upload(std::vector<float>(rank * k, 0), {rank, k});
    grad_b = bench.upload(std::vector<float>(n * rank, 0), {n, rank});
    const Tensor w = up(values(n, k, 6, 0.05), {n, k});
    auto [codes, scales] = quantized(w, grouping);
    w_values = dequantized(codes, scales, grouping);
    matrix.own_rowwise(std::move(codes), std::move(scales));
    weight = {.name = "layer", .n = n, .k = k, .fp8 = &matrix, .plain = {}, .bias = {}};
    const Grouping activations = is_mx(grouping) ? Grouping::kMx1x32 : Grouping::k1x128;
    auto [x_codes, x_scales] = quantized(x, activations);
    x8_values = dequantized(x_codes, x_scales, activations);
    auto [dy_codes, dy_scales] = quantized(dy, activations);
    dy8_values = dequantized(dy_codes, dy_scales, activations);
  }

  Tensor up(const Doubles& values, Shape shape) {
    return bench.upload(testing::narrowed<T>(values), shape);
  }
  std::pair<Tensor, Tensor> quantized(const Tensor& from, Grouping grouping) {
    const int64_t rows = from.shape()[0], cols = from.shape()[1];
    Tensor codes = bench.arena.tensor(Category::kRowwiseShard, "codes", DType::kE4M3, {rows, cols});
    Tensor scales = bench.arena.tensor(Category::kScales, "scales", scale_dtype(grouping),
                                       gemm_scale_shape(grouping, rows, cols));
    const Fp8View view{codes, scales, grouping};
    quantize(&view, nullptr, from, {}, bench.stream);
    return {std::move(codes), std::move(scales)};
  }
  Doubles dequantized(const Tensor& codes, const Tensor& scales, Grouping grouping) {
    Tensor wide = bench.arena.tensor(Category::kWorkspace, "wide", DType::kF32, codes.shape());
    dequantize(wide, {codes, scales, grouping}, bench.stream);
    return testing::widened(bench.download<float>(wide));
  }
  LoraFactors lora() const { return {a, b, grad_a, grad_b, 2.0f}; }
  Linear linear(const LoraFactors* factors = nullptr,
                ColumnwisePolicy policy = ColumnwisePolicy::kRelease) const {
    return {.weight = &weight, .lora = factors, .columnwise = policy};
  }
  Tensor result(Shape shape) {
    return bench.arena.tensor(Category::kActivations, "result", DTypeOf<T>::value, shape);
  }
  Doubles values(const Tensor& tensor) { return testing::widened(bench.download<T>(tensor)); }

  /// `terms` is Σ |products|: f32 sums of FP8 products lose at most a few units of 2^-24 of it per
  /// block of K (tensor cores keep fewer bits: 2^-10 is their bound, see fp8/gemm_test.cpp), then
  /// one rounding to T.
  void expect_sum(const Doubles& got, const Doubles& want, const Doubles& terms,
                  double roundings = 1) {
    Doubles scaled_got = got, scaled_want = want;
    for (size_t i = 0; i < got.size(); ++i) {
      const double unit =
          0x1p-10 * terms[i] + roundings * testing::kRounding<T> * std::abs(want[i]);
      scaled_got[i] = got[i] / unit;
      scaled_want[i] = want[i] / unit;
    }
    testing::expect_close(scaled_got, scaled_want, 1, 0);
  }
};

template <typename T>
class LinearOnDevice : public ::testing::Test {};
using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(LinearOnDevice, Types);

TYPED_TEST(LinearOnDevice, Fp8ForwardAndDgradFollowTheDequantisedReference) {
  using T = TypeParam;
  for (auto [tokens, n, k] :
       {std::array<int64_t, 3>{32, 256, 384}, {40, 192, 576}, {5, 144, 272}}) {
    SCOPED_TRACE(message(tokens, " ", n, " ", k));
    Fp8Layer<T> layer(tokens, n, k);
    Context& ctx = layer.bench.ctx;
    layer.weight.bias = layer.bias;
    const Tensor y = layer.result({tokens, n}), dx = layer.result({tokens, k});
    LinearSaved saved;
    linear_forward(y, layer.x, layer.linear(), &saved, ctx);
    Doubles expected = product(layer.x8_values, layer.w_values, tokens, n, k);
    for (int64_t i = 0; i < tokens * n; ++i)
      expected[i] += layer.bias_values[i % n];
    layer.expect_sum(layer.values(y), expected,
                     product(layer.x8_values, layer.w_values, tokens, n, k, true));
    EXPECT_EQ(saved.input, nullptr);
    EXPECT_EQ(layer.matrix.usage(), (Usage{.rowwise = true, .columnwise = false}));

    linear_backward(dx, layer.dy, saved, layer.linear(), false, ctx);
    const Doubles wt = transposed(layer.w_values, n, k);
    const Doubles base = product(layer.dy8_values, wt, tokens, k, n);
    const Doubles terms = product(layer.dy8_values, wt, tokens, k, n, true);
    layer.expect_sum(layer.values(dx), base, terms);

    // Once more onto what is there.
    linear_backward(dx, layer.dy, saved, layer.linear(), true, ctx);
    Doubles twice = base, double_terms = terms;
    for (double& value : twice)
      value *= 2;
    for (double& value : double_terms)
      value *= 2;
    layer.expect_sum(layer.values(dx), twice, double_terms, 3);
  }
}

TYPED_TEST(LinearOnDevice, AdapterGradientsUseTheUnquantisedInput) {
  using T = TypeParam;
  const int64_t tokens = 32, n = 256, k = 128;
  Fp8Layer<T> layer(tokens, n, k);
  Context& ctx = layer.bench.ctx;
  const int64_t rank = layer.rank;
  const LoraFactors lora = layer.lora();
  const Tensor y = layer.result({tokens, n}), dx = layer.result({tokens, k});
  LinearSaved saved;
  linear_forward(y, layer.x, layer.linear(&lora), &saved, ctx);
  EXPECT_EQ(saved.input->x.data, layer.x.view().data);
  linear_backward(dx, layer.dy, saved, layer.linear(&lora), false, ctx);

  const Doubles xa = product(layer.x_values, layer.a_values, tokens, rank, k);
  const Doubles dxa =
      product(layer.dy_values, transposed(layer.b_values, n, rank), tokens, rank, n);
  const auto close = [&](const Doubles& got, const Doubles& want) {
    const double rounding = 4 * testing::kRounding<T> + 0x1p-12;
    testing::expect_close(got, want, rounding * testing::largest(want), rounding);
  };
  Doubles expected = product(layer.x8_values, layer.w_values, tokens, n, k);
  const Doubles branch = product(xa, layer.b_values, tokens, n, rank);
  for (size_t i = 0; i < expected.size(); ++i)
    expected[i] += 2 * branch[i];
  close(layer.values(y), expected);

  expected = product(layer.dy8_values, transposed(layer.w_values, n, k), tokens, k, n);
  const Doubles back = product(dxa, transposed(layer.a_values, rank, k), tokens, k, rank);
  for (size_t i = 0; i < expected.size(); ++i)
    expected[i] += 2 * back[i];
  close(layer.values(dx), expected);

  Doubles grad_b = product(transposed(layer.dy_values, tokens, n), transposed(xa, tokens, rank), n,
                           rank, tokens);
  Doubles grad_a = product(transposed(dxa, tokens, rank), transposed(layer.x_values, tokens, k),
                           rank, k, tokens);
  for (double& value : grad_a)
    value *= 2;
  for (double& value : grad_b)
    value *= 2;
  close(testing::widened(layer.bench.template download<float>(layer.grad_b)), grad_b);
  close(testing::widened(layer.bench.template download<float>(layer.grad_a)), grad_a);
}

TEST(LinearPolicy, ReleaseLeavesNoColumnwiseCopyAndChangesNoBit) {
  Fp8Layer<bf16> layer(32, 256, 384);
  Context& ctx = layer.bench.ctx;
  Arena& arena = layer.bench.arena;
  const Tensor released = layer.result({32, 384}), kept = layer.result({32, 384});
  LinearSaved saved;
  arena.reset_peak();
  linear_backward(released, layer.dy, saved, layer.linear(), false, ctx);
  EXPECT_EQ(layer.matrix.usage(), (Usage{.rowwise = true, .columnwise = false}));
  EXPECT_EQ(arena.bytes(Category::kColumnwise).now, 0);
  EXPECT_EQ(arena.bytes(Category::kColumnwise).peak, 256 * 384);
  linear_backward(kept, layer.dy, saved, layer.linear(nullptr, ColumnwisePolicy::kResident), false,
                  ctx);
  EXPECT_EQ(layer.matrix.usage(), (Usage{.rowwise = true, .columnwise = true}));
  EXPECT_EQ(arena.bytes(Category::kColumnwise).now, 256 * 384);
  EXPECT_EQ(layer.values(released), layer.values(kept));
}

TEST(LinearPolicy, DirectMakesNoColumnwiseCopyAndChangesNoBit) {
  for (const int64_t tokens : {int64_t{33}, int64_t{kDirectTokens} + 1}) {
    Fp8Layer<bf16> layer(tokens, 144, 272);
    Context& ctx = layer.bench.ctx;
    LinearSaved saved;
    const auto dx = [&](ColumnwisePolicy policy) {
      const Tensor result = layer.result({tokens, 272});
      layer.bench.arena.reset_peak();
      linear_backward(result, layer.dy, saved, layer.linear(nullptr, policy), false, ctx);
      EXPECT_EQ(layer.matrix.usage(), (Usage{.rowwise = true, .columnwise = false}));
      return layer.values(result);
    };
    const auto peak = [&] { return layer.bench.arena.bytes(Category::kColumnwise).peak; };
    const auto released = dx(ColumnwisePolicy::kRelease);
    EXPECT_EQ(peak(), 144 * 272);
    EXPECT_EQ(dx(ColumnwisePolicy::kDirect), released);
    EXPECT_EQ(peak(), 0);
    EXPECT_EQ(dx(ColumnwisePolicy::kAuto), released);
    EXPECT_EQ(peak(), tokens <= kDirectTokens ? 0 : 144 * 272);
  }
}

TEST(LinearPolicy, WithoutDxNoColumnwiseCopyIsMade) {
  Fp8Layer<bf16> layer(32, 128, 256);
  Context& ctx = layer.bench.ctx;
  const LoraFactors lora = layer.lora();
  const Tensor y = layer.result({32, 128});
  LinearSaved saved;
  linear_forward(y, layer.x, layer.linear(&lora), &saved, ctx);
  layer.bench.arena.reset_peak();
  linear_backward(View{}, layer.dy, saved, layer.linear(&lora), false, ctx);
  EXPECT_EQ(layer.bench.arena.bytes(Category::kColumnwise).peak, 0);
  EXPECT_GT(testing::largest(testing::widened(layer.bench.download<float>(layer.grad_a))), 0);
}

// A frozen FP8 layer reads dy once, by its quantiser: its dx may take dy's memory.
TEST(LinearPolicy, DxMayBeDyInAFrozenSquareLayer) {
  Fp8Layer<bf16> layer(32, 256, 256);
  const Tensor dx = layer.result({32, 256});
  LinearSaved saved;
  linear_backward(dx, layer.dy, saved, layer.linear(), false, layer.bench.ctx);
  const Doubles want = layer.values(dx);
  linear_backward(layer.dy, layer.dy, saved, layer.linear(), false, layer.bench.ctx);
  EXPECT_EQ(layer.values(layer.dy), want);
}

// Every refusal says what it refused with shapes or names and what to do, and changes nothing.
struct Refusal {
  Fp8Layer<bf16> layer{32, 128, 256};
  Tensor y = layer.result({32, 128}), dx = layer.result({32, 256});
  LinearSaved saved;

  template <typename E>
  void expect(const std::function<void()>& call, const std::vector<std::string>& said) {
    const Usage before = layer.matrix.usage();
    const uint64_t version = layer.matrix.version();
    const int64_t bytes = layer.bench.arena.total().now;
    const Doubles old = layer.values(dx);
    try {
      call();
      ADD_FAILURE() << "no exception; wanted one that says " << said.front();
    } catch (const E& error) {
      for (const std::string& part : said)
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(layer.matrix.usage(), before);
    EXPECT_EQ(layer.matrix.version(), version);
    EXPECT_EQ(layer.bench.arena.total().now, bytes);
    const Doubles now = layer.values(dx);
    EXPECT_TRUE(std::equal(old.begin(), old.end(), now.begin(),
                           [](double a, double b) { return a == b || (a != a && b != b); }));
  }
};

TEST(LinearRefuses, AWrongShapeDtypeOrDevice) {
  Refusal r;
  auto& layer = r.layer;
  Context& ctx = layer.bench.ctx;
  const Tensor narrow = layer.result({32, 127});
  r.expect<ShapeError>([&] { linear_forward(narrow, layer.x, layer.linear(), &r.saved, ctx); },
                       {"layer [128, 256] fp8", "[32, 127]"});
  r.expect<ShapeError>(
      [&] { linear_backward(narrow, layer.dy, r.saved, layer.linear(), false, ctx); },
      {"layer [128, 256] fp8", "[32, 127]"});
  const Tensor f32 = layer.bench.upload(std::vector<float>(32 * 128, 1), {32, 128});
  r.expect<ShapeError>([&] { linear_forward(f32, layer.x, layer.linear(), &r.saved, ctx); },
                       {"of one dtype", "f32 [32, 128]"});
  LinearWeight wrong = layer.weight;
  wrong.n = 100;
  r.expect<ShapeError>([&] { linear_forward(r.y, layer.x, {.weight = &wrong}, &r.saved, ctx); },
                       {"declared [100, 256]", "fp8 [128, 256]"});
  wrong = layer.weight;
  wrong.gradient = f32;
  r.expect<ShapeError>([&] { linear_forward(r.y, layer.x, {.weight = &wrong}, &r.saved, ctx); },
                       {"gradient", "[128, 256]", "[32, 128]"});
  View elsewhere = r.y;
  elsewhere.device = {DeviceKind::kPlan, 0};
  r.expect<ShapeError>([&] { linear_forward(elsewhere, layer.x, layer.linear(), &r.saved, ctx); },
                       {"all must be on one device"});
  r.expect<LogicError>([&] { linear_forward(r.y, layer.x, {}, &r.saved, ctx); },
                       {"without a weight"});
}

TEST(LinearRefuses, AGradientOfAFrozenWeightOrOfNothing) {
  Refusal r;
  auto& layer = r.layer;
  Context& ctx = layer.bench.ctx;
  r.expect<LogicError>([&] { linear_weight_gradient(r.saved, layer.linear(), ctx); },
                       {"layer [128, 256] is frozen", "Set LinearWeight::gradient"});
  // Frozen in forward, so no x was kept.
  linear_forward(r.y, layer.x, layer.linear(), &r.saved, ctx);
  LinearWeight thawed = layer.weight;
  const Tensor gradient = layer.bench.upload(std::vector<float>(128 * 256, 0), {128, 256});
  thawed.gradient = gradient;
  r.expect<LogicError>(
      [&] { linear_backward(r.dx, layer.dy, r.saved, {.weight = &thawed}, false, ctx); },
      {"layer is trainable in this backward but was frozen in its forward", "before the forward"});
  r.expect<LogicError>([&] { linear_weight_gradient(r.saved, {.weight = &thawed}, ctx); },
                       {"no gradient of layer is waiting", "delay_weight_gradient"});
  const LoraFactors lora = layer.lora();
  r.expect<LogicError>(
      [&] { linear_backward(r.dx, layer.dy, r.saved, layer.linear(&lora), false, ctx); },
      {"has an adapter but nothing was saved"});
}

TEST(LinearRefuses, ReadersThatMixBlocksAndMx) {
  Fp8Layer<bf16> blocks(32, 128, 256), mx(32, 128, 256, Grouping::kMx1x32);
  const Linear a = blocks.linear(), b = mx.linear();
  EXPECT_THROW(activation_grouping({&a, &b}), ConfigError);
  EXPECT_EQ(activation_grouping({&b}), Grouping::kMx1x32);
}

}  // namespace
}  // namespace rowshard
