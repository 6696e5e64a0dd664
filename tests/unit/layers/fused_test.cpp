// The modules, whose kernels quantise what they compute and make several results at once, against
// the same layer put together from its parts, each of which reads and writes whole tensors: equal
// to the last bit, outputs and all gradients.
#include "module_fixture.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::difference;
using testing::Module;
using testing::ModuleKind;
using testing::ModuleOptions;
using testing::NamedBytes;

/// norm → linear layers, or norm → gate, up → activation → down, from operations that fuse nothing.
class Parts {
 public:
  explicit Parts(Module& module)
      : module_(module), ctx_(module.bench.ctx), layers_(module.linears()) {}

  NamedBytes step() {
    module_.clear();
    const ConstView x = module_.x;
    const Shape statistics_shape = norm_statistics_shape(module_.options.norm, x.dim(0));
    const Tensor h = make(x.shape), d_h = make(x.shape);
    const Tensor statistics =
        ctx_.arena.tensor(Category::kActivations, "statistics", DType::kF32, statistics_shape);
    norm_forward(h, nullptr, statistics, x, module_.norm(), ctx_.stream);
    saved_.resize(layers_.size());
    module_.kind == ModuleKind::kLayerNormMlp ? mlp(h, d_h) : projections(h, d_h);
    norm_backward(module_.dx, d_h, x, module_.norm(), statistics, false, module_.norm_gradients(),
                  ctx_);
    return module_.results();
  }

 private:
  Tensor make(Shape shape) {
    return ctx_.arena.tensor(Category::kActivations, "part", DType::kBF16, shape);
  }
  void forward(size_t i, const View& y, const ConstView& x) {
    linear_forward(y, x, layers_[i], &saved_[i], ctx_);
  }
  void backward(size_t i, const View& dx, const ConstView& dy, bool accumulate) {
    linear_backward(dx, dy, saved_[i], layers_[i], accumulate, ctx_);
    if (saved_[i].delayed.waiting)
      linear_weight_gradient(saved_[i], layers_[i], ctx_);
  }
  void projections(const ConstView& h, const View& d_h) {
    const int64_t t = module_.options.tokens;
    for (size_t i = 0; i < 2; ++i)
      forward(i, module_.y.view().slice_rows(i * t, t), h);
    for (size_t i = 0; i < 2; ++i)
      backward(i, d_h, module_.dy.view().slice_rows(i * t, t), i > 0);
  }
  void mlp(const ConstView& h, const View& d_h) {
    const Activation kind = module_.options.activation;
    const bool gated = is_gated(kind);
    const Shape shape{module_.options.tokens, module_.options.ffn};
    const Tensor gate = make(shape), up = make(shape), a = make(shape);
    const Tensor d_gate = make(shape), d_up = make(shape), d_a = make(shape);
    forward(0, gate, h);
    if (gated)
      forward(1, up, h);
    const View second = gated ? up.view() : View();
    activation_forward(a, nullptr, gate, second, kind, ctx_.stream);
    const size_t down = layers_.size() - 1;
    forward(down, module_.y, a);
    backward(down, d_a, module_.dy, false);
    activation_backward(d_gate, gated ? d_up.view() : View(), d_a, gate, second, kind, ctx_.stream);
    backward(0, d_h, d_gate, false);
    if (gated)
      backward(1, d_h, d_up, true);
  }

  Module& module_;
  Context& ctx_;
  std::vector<Linear> layers_;
  std::vector<LinearSaved> saved_;
};

class FusedModule : public ::testing::TestWithParam<ModuleKind> {
 protected:
  /// Every combination of what hangs on the weights.
  void expect_parts(ModuleOptions options, std::initializer_list<bool> shapes) {
    for (const bool odd : shapes) {
      for (const bool lora : {false, true}) {
        for (const bool trainable : {false, true}) {
          SCOPED_TRACE(message("odd ", odd, " lora ", lora, " trainable ", trainable));
          options.bias = lora != trainable;
          options.lora = lora;
          options.trainable = trainable;
          options.delay = trainable && odd;
          options.tokens = odd ? 37 : 64;
          options.hidden = odd ? 272 : 256;
          options.ffn = odd ? 336 : 512;
          Bench bench;
          Module module(bench, GetParam(), options);
          EXPECT_EQ(difference(module.step(), Parts(module).step()), "");
        }
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Modules, FusedModule,
                         ::testing::Values(ModuleKind::kLayerNormLinear, ModuleKind::kLayerNormMlp),
                         [](const auto& info) { return testing::to_string(info.param); });

TEST_P(FusedModule, GivesTheBitsOfItsParts) {
  expect_parts({}, {false, true});
}
TEST_P(FusedModule, GivesTheBitsOfItsPartsInEveryForm) {
  expect_parts({.norm = NormKind::kLayer, .activation = Activation::kGelu}, {true});
  expect_parts({.fp8 = false, .activation = Activation::kGeGlu}, {true});
  expect_parts({.backward_override = BackwardOverride::kDequantized}, {true});
}

}  // namespace
}  // namespace rowshard
