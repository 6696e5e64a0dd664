// A module with several layers refuses before the first of them has run: no output, gradient, copy
// or saved tensor has changed. The messages are tested with the single layer, in linear_test.cpp.
#include "module_fixture.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::difference;
using testing::Module;
using testing::ModuleKind;
using testing::NamedBytes;
using testing::TestWeight;

class ModuleRefuses : public ::testing::TestWithParam<ModuleKind> {
 protected:
  Bench bench;
  Module module{bench, GetParam(), {.bias = true, .lora = true}};

  /// The weight whose layer runs last, forward and backward.
  TestWeight& last(bool backward) {
    const bool down = GetParam() == ModuleKind::kLayerNormMlp && !backward;
    return down ? module.weights[2]
                : module.weights[std::min<size_t>(module.weights.size() - 1,
                                                  GetParam() == ModuleKind::kLayerNormMlp ? 1 : 2)];
  }
  template <typename E>
  void expect(const std::function<void()>& call) {
    module.clear();
    const NamedBytes before = module.results();
    const int64_t bytes = bench.arena.total().now;
    EXPECT_THROW(call(), E);
    EXPECT_EQ(difference(module.results(), before), "");
    EXPECT_EQ(bench.arena.total().now, bytes);
    for (const TestWeight& w : module.weights)
      EXPECT_EQ(w.usage(), (Usage{.rowwise = true, .columnwise = false}));
  }
};
INSTANTIATE_TEST_SUITE_P(Modules, ModuleRefuses, ::testing::ValuesIn(testing::kModules),
                         [](const auto& info) { return testing::to_string(info.param); });

TEST_P(ModuleRefuses, AWeightThatIsNotWhatItDeclares) {
  const NamedBytes want = module.step();
  Module::Saved saved;
  last(false).weight.k += 16;
  expect<ShapeError>([&] { module.forward(&saved, bench.ctx); });
  last(false).weight.k -= 16;
  last(false).weight.bias.shape = {7};
  expect<ShapeError>([&] { module.forward(&saved, bench.ctx); });
  last(false).weight.bias.shape = {last(false).weight.n};
  EXPECT_EQ(difference(module.step(), want), "") << "and works when it is put right";
}

TEST_P(ModuleRefuses, AnAdapterThatItsForwardDidNotHave) {
  const NamedBytes want = module.step();
  Module::Saved saved;
  last(true).adapted = false;
  module.forward(&saved, bench.ctx);
  last(true).adapted = true;
  expect<LogicError>([&] { module.backward(saved, bench.ctx); });
  EXPECT_EQ(difference(module.step(), want), "");
}

TEST_P(ModuleRefuses, AGradientThatDoesNotFit) {
  Module::Saved saved;
  module.forward(&saved, bench.ctx);
  const Tensor gradient = bench.upload(std::vector<float>(256, 0), {16, 16});
  last(true).weight.gradient = gradient;
  expect<ShapeError>([&] { module.backward(saved, bench.ctx); });
  last(true).weight.gradient = {};
  const Shape right = module.dx.shape();
  Tensor dx =
      bench.arena.tensor(Category::kActivations, "test", DType::kBF16, {right[0] + 8, right[1]});
  std::swap(dx, module.dx);
  expect<ShapeError>([&] { module.backward(saved, bench.ctx); });
  std::swap(dx, module.dx);
  module.clear();
  module.backward(saved, bench.ctx);
  NamedBytes got = module.results(), want = module.step();
  got.erase("y");  // cleared since its forward
  want.erase("y");
  EXPECT_EQ(difference(got, want), "") << "the refused backward used nothing up";
  if (GetParam() == ModuleKind::kLinear || GetParam() == ModuleKind::kLayerNormMlp)
    expect<LogicError>([&] { module.backward(saved, bench.ctx); });  // the second after one forward
}

}  // namespace
}  // namespace rowshard
