// Every operation against what PyTorch's autograd computed in float64 (tests/parity/make_golden.py;
// docs/parity.md says what was computed how). Inputs are bf16 values, so each dtype starts from the
// same numbers. f64 runs on the host only and shows that the formula is the same; f32 and bf16 run
// on the device under test and show that nothing more than rounding is added.
#include "golden_file.h"
#include "layer_test.h"
#include "layers/activation.h"
#include "layers/attention.h"
#include "layers/cross_entropy.h"
#include "layers/linear.h"
#include "layers/norm.h"
#include "layers/rope.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::test_device;

using testing::GoldenTensor;

const GoldenTensor& golden(const std::string& name) {
  static const testing::GoldenFile file("operations", "make_golden.py");
  return file.at(name);
}

double golden_scalar(const std::string& name) {
  return golden(name).values.at(0);
}

std::vector<int32_t> golden_integers(const std::string& name) {
  const Doubles& values = golden(name).values;
  return std::vector<int32_t>(values.begin(), values.end());
}

enum class Against { kRow, kTensor };

template <typename T>
class GoldenLayers : public ::testing::Test {
 protected:
  static constexpr bool kIsDouble = std::is_same_v<T, double>;
  using Statistic = Accumulator<T>;

  // Of the largest value beside it. f32: some tens of roundings of 2^-24; bf16: a few of 2^-9.
  static constexpr double kBound = kIsDouble ? 1e-10 : std::is_same_v<T, float> ? 2e-6 : 1.6e-2;

  void SetUp() override {
    if (kIsDouble && !test_device.is_host())
      GTEST_SKIP() << "f64 is computed on the host only";
  }

  Tensor input(const std::string& name) {
    const GoldenTensor& tensor = golden(name);
    std::vector<T> values;
    for (double value : tensor.values) {
      if constexpr (kIsDouble) {
        values.push_back(value);
      } else {
        values.push_back(T(static_cast<float>(value)));
      }
    }
    return bench.upload(values, tensor.shape());
  }
  Tensor output(const std::string& name) { return make<T>(golden(name).shape()); }
  template <typename U>
  Tensor make(Shape shape) {
    return bench.arena.tensor(Category::kActivations, "golden", DTypeOf<U>::value, shape);
  }
  /// A tensor that is accumulated into, with something in it already.
  Tensor accumulator(const std::string& name) {
    const GoldenTensor& tensor = golden(name);
    return bench.upload(std::vector<Statistic>(tensor.values.size(), kBefore), tensor.shape());
  }

  /// Every element within kBound of the largest magnitude of its row, or of the whole tensor.
  template <typename U>
  void expect(const std::string& name, const ConstView& got, Against against = Against::kTensor,
              double before = 0) {
    const GoldenTensor& want = golden(name);
    const std::vector<U> values = bench.template download<U>(got);
    ASSERT_EQ(values.size(), want.values.size()) << name;
    const auto size = static_cast<int64_t>(values.size());
    const int64_t row = against == Against::kRow ? want.dims.back() : size;
    for (int64_t begin = 0; begin < size; begin += row) {
      double largest = std::abs(before);
      for (int64_t i = begin; i < begin + row; ++i)
        largest = std::max(largest, std::abs(want.values[i]));
      for (int64_t i = begin; i < begin + row; ++i) {
        const double value = static_cast<double>(widen(values[i])) - before;
        ASSERT_NEAR(value, want.values[i], kBound * largest) << name << ", element " << i;
      }
    }
  }

  static constexpr Statistic kBefore = 0.5;
  Bench bench;
};

using Types = ::testing::Types<double, float, bf16>;
TYPED_TEST_SUITE(GoldenLayers, Types);

TYPED_TEST(GoldenLayers, RmsNorm) {
  using T = TypeParam;
  using S = Accumulator<T>;
  Bench& bench = this->bench;
  const Tensor x = this->input("rms_norm.x"), weight = this->input("rms_norm.weight"),
               dy = this->input("rms_norm.dy");
  const double eps = golden_scalar("rms_norm.eps");
  const Tensor y = this->output("rms_norm.y"), dx = this->output("rms_norm.dx");
  const Tensor rstd = this->template make<S>({x.shape()[0]});
  const Norm norm{.weight = weight, .eps = eps};
  norm_forward(y, nullptr, rstd, x, norm, bench.stream);
  this->template expect<T>("rms_norm.y", y, Against::kRow);
  const Tensor dweight = this->accumulator("rms_norm.dweight");
  norm_backward(dx, dy, x, norm, rstd, false, {.weight = dweight}, bench.ctx);
  this->template expect<T>("rms_norm.dx", dx, Against::kRow);
  this->template expect<S>("rms_norm.dweight", dweight, Against::kTensor, this->kBefore);
}

TYPED_TEST(GoldenLayers, Rope) {
  using T = TypeParam;
  Bench& bench = this->bench;
  for (const std::string& name : {std::string("rope_default"), std::string("rope_llama3")}) {
    std::optional<Llama3RopeScaling> scaling;
    if (name == "rope_llama3")
      scaling = Llama3RopeScaling{8, 1, 4, 64};
    const Tensor x = this->input(name + ".x"), dy = this->input(name + ".dy");
    const RopeTable table(x.shape()[2], 512, 10000.0, scaling, bench.ctx);
    const std::vector<int32_t> at = golden_integers(name + ".positions");
    const Tensor positions = bench.upload(at, {static_cast<int64_t>(at.size())});
    rope(x, positions, table, RopeDirection::kForward, bench.stream);
    this->template expect<T>(name + ".y", x);
    rope(dy, positions, table, RopeDirection::kBackward, bench.stream);
    this->template expect<T>(name + ".dx", dy);
  }
}

TYPED_TEST(GoldenLayers, Attention) {
  using T = TypeParam;
  using S = Accumulator<T>;
  Bench& bench = this->bench;
  if (!test_device.is_host() && !std::is_same_v<T, bf16>)
    GTEST_SKIP() << "attention on cuda takes bf16";
  for (const std::string& name : {std::string("attention_16"), std::string("attention_64")}) {
    const Tensor q = this->input(name + ".q"), k = this->input(name + ".k"),
                 v = this->input(name + ".v"), d_o = this->input(name + ".do");
    const Segments segments(golden_integers(name + ".bounds"), bench.ctx);
    const double scale = 1 / std::sqrt(static_cast<double>(q.shape()[2]));
    const Tensor o = this->output(name + ".o");
    const Shape by_head = golden(name + ".lse").shape();
    const Tensor lse = this->template make<S>({by_head[1], by_head[0]});
    attention(o, lse, q, k, v, segments, scale, bench.ctx);
    this->template expect<T>(name + ".o", o);
    std::vector<S> sums = bench.template download<S>(lse), transposed(sums.size());
    for (int64_t h = 0; h < by_head[0]; ++h) {
      for (int64_t t = 0; t < by_head[1]; ++t)
        transposed[h * by_head[1] + t] = sums[t * by_head[0] + h];
    }
    this->template expect<S>(name + ".lse", bench.upload(transposed, by_head));
    const Tensor dq = this->output(name + ".dq"), dk = this->output(name + ".dk"),
                 dv = this->output(name + ".dv");
    attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, segments, scale, bench.ctx);
    this->template expect<T>(name + ".dq", dq);
    this->template expect<T>(name + ".dk", dk);
    this->template expect<T>(name + ".dv", dv);
  }
}

TYPED_TEST(GoldenLayers, SwiGlu) {
  using T = TypeParam;
  Bench& bench = this->bench;
  const Tensor gate = this->input("swiglu.gate"), up = this->input("swiglu.up"),
               dy = this->input("swiglu.dy");
  const Tensor y = this->output("swiglu.y"), dgate = this->output("swiglu.dgate"),
               dup = this->output("swiglu.dup");
  activation_forward(y, nullptr, gate, up, Activation::kSwiGlu, bench.stream);
  this->template expect<T>("swiglu.y", y);
  activation_backward(dgate, dup, dy, gate, up, Activation::kSwiGlu, bench.stream);
  this->template expect<T>("swiglu.dgate", dgate);
  this->template expect<T>("swiglu.dup", dup);
}

TYPED_TEST(GoldenLayers, CrossEntropy) {
  using T = TypeParam;
  using S = Accumulator<T>;
  Bench& bench = this->bench;
  const Tensor logits = this->input("cross_entropy.logits");
  const int64_t rows = logits.shape()[0];
  const Tensor labels = bench.upload(golden_integers("cross_entropy.labels"), {rows});
  const Tensor losses = this->template make<S>({rows});
  token_losses(losses, logits, labels, bench.stream);
  this->template expect<S>("cross_entropy.losses", losses);
  const Tensor sum = bench.upload(std::vector<double>{0.25}, {1});
  cross_entropy(sum, logits, labels, golden_scalar("cross_entropy.scale"), bench.ctx);
  double want = 0;
  for (double loss : golden("cross_entropy.losses").values)
    want += loss;
  EXPECT_NEAR(bench.template download<double>(sum)[0] - 0.25, want, this->kBound * want);
  this->template expect<T>("cross_entropy.dlogits", logits);
}

TYPED_TEST(GoldenLayers, LoraLinear) {
  using T = TypeParam;
  using S = Accumulator<T>;
  Bench& bench = this->bench;
  const Tensor x = this->input("lora.x"), dy = this->input("lora.dy"), a = this->input("lora.a"),
               b = this->input("lora.b"), plain = this->input("lora.weight"),
               bias = this->input("lora.bias");
  LinearWeight weight;
  weight.name = "golden";
  weight.n = plain.shape()[0];
  weight.k = plain.shape()[1];
  weight.plain = plain;
  weight.bias = bias;
  const Tensor da = this->accumulator("lora.da"), db = this->accumulator("lora.db");
  LoraFactors factors;
  factors.a = a;
  factors.b = b;
  factors.grad_a = da;
  factors.grad_b = db;
  factors.scale = static_cast<float>(golden_scalar("lora.scale"));
  const Tensor y = this->output("lora.y"), dx = this->output("lora.dx");
  LinearSaved saved;
  const Linear linear{.weight = &weight, .lora = &factors};
  linear_forward(y, x, linear, &saved, bench.ctx);
  this->template expect<T>("lora.y", y);
  linear_backward(dx, dy, saved, linear, false, bench.ctx);
  this->template expect<T>("lora.dx", dx);
  this->template expect<S>("lora.da", da, Against::kTensor, this->kBefore);
  this->template expect<S>("lora.db", db, Against::kTensor, this->kBefore);
}

}  // namespace
}  // namespace rowshard
