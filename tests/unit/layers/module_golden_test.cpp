// The four modules against PyTorch's autograd in float64 on the dequantised operands
// (tests/parity/make_module_golden.py): every output and gradient, with bias and adapter on every
// weight. Inputs come from the same formula on both sides. docs/parity.md states the bounds.
#include <deque>

#include "golden_file.h"
#include "layers/grouped_linear.h"
#include "layers/layer_norm_mlp.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;

constexpr int64_t kStride = 21, kTokens = 48, kHidden = 144, kFfn = 160, kRank = 4;
constexpr int64_t kRows[] = {21, 0, 27};
constexpr double kEps = 1e-5;

Doubles golden_values(int64_t rows, int64_t cols, uint32_t seed, int exponent) {
  Doubles result(rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) {
    uint32_t h = static_cast<uint32_t>(i + 1) * 2654435761u + seed * 40503u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    const double v = (static_cast<double>((h >> 20) % 256) - 128) / 64;
    const int64_t tile = (i / cols / 128 * 3 + i % cols / 128) % 4;
    result[i] = std::ldexp(v, static_cast<int>(tile) + exponent);
  }
  return result;
}

const testing::GoldenFile& golden() {
  static const testing::GoldenFile file("modules", "make_module_golden.py");
  return file;
}

template <typename T>
class ModuleGolden : public ::testing::Test {
 protected:
  static constexpr bool kF32 = std::is_same_v<T, float>;
  Bench bench;
  std::string prefix;
  bool fp8 = false;
  bool requantised = false;  // products of products: an MLP's
  BackwardOverride how = BackwardOverride::kNone;

  struct Weight {
    LinearWeight weight;
    LoraFactors lora;
    std::unique_ptr<Fp8Matrix> matrix;
    Tensor master, bias, gradient, bias_gradient, a, b, grad_a, grad_b;
  };
  std::deque<Weight> weights;
  Tensor norm_weight, norm_bias, norm_dweight, norm_dbias;

  Tensor up(const Doubles& values, Shape shape) {
    return bench.upload(testing::narrowed<T>(values), shape);
  }
  Tensor zeros(Shape shape) { return bench.upload(std::vector<float>(shape.elements(), 0), shape); }
  Tensor result(int64_t rows, int64_t cols) {
    return bench.arena.tensor(Category::kActivations, "result", DTypeOf<T>::value, {rows, cols});
  }

  Linear linear(const char* name, int64_t n, int64_t k, uint32_t seed) {
    Weight& w = weights.emplace_back();
    w.master = up(golden_values(n, k, seed, -6), {n, k});
    w.bias = up(golden_values(1, n, seed + 1, 0), {n});
    w.a = up(golden_values(kRank, k, seed + 2, -5), {kRank, k});
    w.b = up(golden_values(n, kRank, seed + 3, -4), {n, kRank});
    w.gradient = zeros({n, k});
    w.bias_gradient = zeros({n});
    w.grad_a = zeros({kRank, k});
    w.grad_b = zeros({n, kRank});
    w.lora = {w.a, w.b, w.grad_a, w.grad_b, 0.5f};
    w.weight.name = name;
    w.weight.n = n;
    w.weight.k = k;
    w.weight.plain = w.master;
    w.weight.bias = w.bias;
    w.weight.gradient = w.gradient;
    w.weight.bias_gradient = w.bias_gradient;
    if (fp8) {
      w.matrix = std::make_unique<Fp8Matrix>(name, n, k, Grouping::k128x128, bench.ctx.device());
      w.matrix->quantize_from(w.master, {true, false}, {}, bench.ctx);
      w.weight.fp8 = w.matrix.get();
    }
    return {.weight = &w.weight, .lora = &w.lora, .backward_override = how};
  }
  Norm norm(NormKind kind) {
    norm_weight = up(golden_values(1, kHidden, 5, 0), {kHidden});
    norm_dweight = zeros({kHidden});
    Norm result{.kind = kind, .weight = norm_weight, .bias = {}, .eps = kEps};
    if (kind == NormKind::kLayer) {
      norm_bias = up(golden_values(1, kHidden, 6, -2), {kHidden});
      norm_dbias = zeros({kHidden});
      result.bias = norm_bias;
    }
    return result;
  }
  NormGradients norm_gradients() const { return {norm_dweight, norm_dbias}; }

  /// By Euclidean norm. Plain products: tens of roundings.
  ///
  /// FP8: products of exact operands differ by a relative `product`: f32 sums on the host; tensor
  /// cores keep 13 bits of the largest of 32 products (an FP8 product differs from f64 by 2^-13 on
  /// an H200, bench/gpu1/own_gemm.cu check); bf16 rounds each result. A result that is quantised
  /// again multiplies that: an error e of a value lies across a rounding tie in e / s of the cases,
  /// s the spacing of codes there, at most 2^-3 of the value, and then the code is off by s. So a
  /// relative error d comes out as √(d · s) <= √(d / 8). There are few such codes, ten or so in the
  /// smallest tensor here, and 7 elements of the smallest result are compared: 4 times that.
  /// Products alone are given 8 times their error.
  double bound() const {
    if (!fp8)
      return kF32 ? 1e-5 : 2e-2;
    if (!kF32)
      return 6e-2;  // √(2^-9 / 8) · 4
    const double product = testing::test_device.is_host() ? 0x1p-20 : 0x1p-13;
    const double normed = 0x1p-22;  // f32 on the way to the first quantiser
    const double again = requantised ? product : normed;
    return 8 * product + 4 * std::sqrt(again / 8);
  }

  template <typename U>
  void expect(const std::string& name, const ConstView& got) {
    const Doubles all = testing::widened(bench.template download<U>(got));
    const Doubles& want = golden().at(prefix + name).values;
    const double norm = golden().at(prefix + name + ".norm").values[0];
    double difference = 0, size = 0, squares = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += std::pow(all.at(i * kStride) - want[i], 2);
      size += want[i] * want[i];
    }
    for (double value : all)
      squares += value * value;
    if (norm == 0) {
      EXPECT_EQ(squares, 0) << prefix << name;
      return;
    }
    this->RecordProperty(prefix + name, message(std::sqrt(difference / size)));
    EXPECT_LE(std::sqrt(difference / size), bound()) << prefix << name;
    EXPECT_NEAR(std::sqrt(squares), norm, bound() * norm) << prefix << name;
  }
  void expect_gradients() {
    for (const Weight& w : weights) {
      const std::string name = ".d" + w.weight.name;
      expect<float>(name + ".w", w.gradient);
      expect<float>(name + ".bias", w.bias_gradient);
      expect<float>(name + ".a", w.grad_a);
      expect<float>(name + ".b", w.grad_b);
    }
    if (norm_dweight)
      expect<float>(".dnorm.w", norm_dweight);
    if (norm_dbias)
      expect<float>(".dnorm.bias", norm_dbias);
  }

  /// `layer` runs forward into y and backward into dx.
  void check(const std::string& module, int64_t y_rows, int64_t y_cols,
             const std::function<void(const View& y, const View& dx, const ConstView& x,
                                      const ConstView& dy)>& layer) {
    prefix = module + "." +
             (!fp8                             ? "plain"
              : how == BackwardOverride::kNone ? "fp8"
                                               : to_string(how));
    const Tensor x = up(golden_values(kTokens, kHidden, 1, -1), {kTokens, kHidden});
    const Tensor dy = up(golden_values(y_rows, y_cols, 2, -4), {y_rows, y_cols});
    const Tensor y = result(y_rows, y_cols), dx = result(kTokens, kHidden);
    layer(y, dx, x, dy);
    expect<T>(".y", y);
    expect<T>(".dx", dx);
    expect_gradients();
  }
  void reset(bool use_fp8, BackwardOverride override = BackwardOverride::kNone) {
    weights.clear();
    norm_dweight.reset();
    norm_dbias.reset();
    fp8 = use_fp8;
    how = override;
  }
};

using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(ModuleGolden, Types);

TYPED_TEST(ModuleGolden, Linear) {
  for (const auto& [fp8, how] : {std::pair{false, BackwardOverride::kNone},
                                 {true, BackwardOverride::kNone},
                                 {true, BackwardOverride::kDequantized},
                                 {true, BackwardOverride::kHighPrecision}}) {
    this->reset(fp8, how);
    const Linear layer = this->linear("linear", kFfn, kHidden, 20);
    this->check("linear", kTokens, kFfn, [&](const View& y, const View& dx, auto x, auto dy) {
      LinearSaved saved;
      linear_forward(y, x, layer, &saved, this->bench.ctx);
      linear_backward(dx, dy, saved, layer, false, this->bench.ctx);
    });
  }
}

TYPED_TEST(ModuleGolden, LayerNormLinear) {
  for (const bool fp8 : {false, true}) {
    for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
      this->reset(fp8);
      const Norm norm = this->norm(kind);
      const std::array<Linear, 2> linears{this->linear("q", kFfn, kHidden, 20),
                                          this->linear("k", kFfn, kHidden, 30)};
      const LayerNormLinear layer{norm, this->norm_gradients(), linears};
      // q above k: [2T, F].
      this->check(
          kind == NormKind::kRms ? "norm_rms" : "norm_layer", 2 * kTokens, kFfn,
          [&](const View& y, const View& dx, const ConstView& x, const ConstView& dy) {
            LayerNormLinearSaved saved;
            layer_norm_linear_forward(
                std::array<View, 2>{y.slice_rows(0, kTokens), y.slice_rows(kTokens, kTokens)}, x,
                layer, &saved, this->bench.ctx);
            layer_norm_linear_backward(dx,
                                       std::array<ConstView, 2>{dy.slice_rows(0, kTokens),
                                                                dy.slice_rows(kTokens, kTokens)},
                                       saved, layer, false, this->bench.ctx);
          });
    }
  }
}

TYPED_TEST(ModuleGolden, LayerNormMlp) {
  for (const bool fp8 : {false, true}) {
    for (const Activation activation :
         {Activation::kSwiGlu, Activation::kGeGlu, Activation::kGelu}) {
      this->reset(fp8);
      this->requantised = true;
      LayerNormMlp layer;
      layer.norm = this->norm(activation == Activation::kGelu ? NormKind::kLayer : NormKind::kRms);
      layer.norm_gradients = this->norm_gradients();
      layer.activation = activation;
      layer.first[0] = this->linear("gate", kFfn, kHidden, 20);
      if (is_gated(activation))
        layer.first[1] = this->linear("up", kFfn, kHidden, 30);
      layer.down = this->linear("down", kHidden, kFfn, 40);
      this->check(std::string("mlp_") + to_string(activation), kTokens, kHidden,
                  [&](const View& y, const View& dx, auto x, auto dy) {
                    LayerNormMlpSaved saved;
                    layer_norm_mlp_forward(y, x, layer, &saved, this->bench.ctx);
                    layer_norm_mlp_backward(dx, dy, saved, layer, false, this->bench.ctx);
                  });
    }
  }
}

TYPED_TEST(ModuleGolden, GroupedLinear) {
  for (const bool fp8 : {false, true}) {
    this->reset(fp8);
    const std::array<Linear, 3> experts{this->linear("expert0", kFfn, kHidden, 20),
                                        this->linear("expert1", kFfn, kHidden, 30),
                                        this->linear("expert2", kFfn, kHidden, 40)};
    this->check("grouped", kTokens, kFfn, [&](const View& y, const View& dx, auto x, auto dy) {
      GroupedLinearSaved saved;
      grouped_linear_forward(y, x, kRows, experts, &saved, this->bench.ctx);
      grouped_linear_backward(dx, dy, saved, experts, false, this->bench.ctx);
    });
  }
}

}  // namespace
}  // namespace rowshard
