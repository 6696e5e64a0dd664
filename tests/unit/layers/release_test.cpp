// Releasing the columnwise copy of frozen weights after dgrad: the 23 cases of the feature this
// library grew from (UpstreamCase…, numbered as there), on both devices, and what those left
// untested. Graphs are in graph_test.cpp.
#include <cstdlib>

#include "module_fixture.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::difference;
using testing::Module;
using testing::ModuleKind;
using testing::ModuleOptions;
using testing::NamedBytes;
using testing::TestWeight;

constexpr Usage kRowwise{.rowwise = true, .columnwise = false};
constexpr Usage kBoth{.rowwise = true, .columnwise = true};

/// An environment variable for the length of a scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedVariable() { unsetenv(name_); }

 private:
  const char* name_;
};

class ReleaseOf : public ::testing::TestWithParam<ModuleKind> {
 protected:
  Bench bench;
  Module make(const ModuleOptions& options) { return Module(bench, GetParam(), options); }
};
INSTANTIATE_TEST_SUITE_P(Modules, ReleaseOf, ::testing::ValuesIn(testing::kModules),
                         [](const auto& info) { return testing::to_string(info.param); });

void expect_usage(const Module& module, Usage usage) {
  for (const TestWeight& w : module.weights)
    EXPECT_EQ(w.usage(), usage) << w.weight.name;
}

TEST_P(ReleaseOf, UpstreamCase01To04DropsTheCopyAfterEveryBackward) {
  Module module = make({});
  for (int step = 0; step < 3; ++step) {
    bench.arena.reset_peak();
    module.step();
    expect_usage(module, kRowwise);
    EXPECT_EQ(module.columnwise_now(), 0);
    EXPECT_EQ(bench.arena.bytes(Category::kColumnwise).peak, module.largest_codes());
  }
}

TEST_P(ReleaseOf, UpstreamCase05To08ResidentKeepsTheCopy) {
  Module module = make({.policy = ColumnwisePolicy::kResident});
  module.step();
  for (const TestWeight& w : module.weights) {
    // An expert without tokens ran no dgrad, so nothing asked for its copy.
    const bool ran = module.kind != ModuleKind::kGroupedLinear || &w != &module.weights[1];
    EXPECT_EQ(w.usage(), ran ? kBoth : kRowwise) << w.weight.name;
  }
}

// Outputs and all gradients over three steps, with and without bias, adapters and recompute, at
// shapes that are and are not multiples of 128.
TEST_P(ReleaseOf, UpstreamCase09To12ReleasedOrResidentGivesTheSameBits) {
  for (const bool odd : {false, true}) {
    for (const bool bias : {false, true}) {
      for (const bool lora : {false, true}) {
        ModuleOptions options{.bias = bias, .lora = lora};
        if (odd) {
          options.tokens = 40;
          options.hidden = 272;
          options.ffn = 336;
          options.expert_rows = {7, 0, 33};
        }
        Module released = make(options);
        options.policy = ColumnwisePolicy::kResident;
        Module resident = make(options);
        for (int step = 0; step < 3; ++step) {
          SCOPED_TRACE(message("odd ", odd, " bias ", bias, " lora ", lora, " step ", step));
          released.next_input(step);
          resident.next_input(step);
          const NamedBytes want = resident.step();
          EXPECT_EQ(difference(released.step(), want), "");
          EXPECT_EQ(difference(released.step(/*recompute=*/true), want), "");
          EXPECT_EQ(difference(resident.step(/*recompute=*/true), want), "");
        }
      }
    }
  }
}

TEST_P(ReleaseOf, UpstreamCase13OverrideReleasesTheOriginalWeights) {
  for (const auto how : {BackwardOverride::kDequantized, BackwardOverride::kHighPrecision}) {
    SCOPED_TRACE(to_string(how));
    Module module = make({.columnwise_at_start = true, .backward_override = how});
    expect_usage(module, kBoth);
    const NamedBytes first = module.step();
    expect_usage(module, kRowwise);
    EXPECT_EQ(module.columnwise_now(), 0);
    bench.arena.reset_peak();
    EXPECT_EQ(difference(module.step(), first), "");
    EXPECT_EQ(bench.arena.bytes(Category::kColumnwise).peak, 0) << "such a backward reads no copy";
  }
}

TEST_P(ReleaseOf, UpstreamCase14To15TrainableKeepsTheCopyAndHasAGradient) {
  for (const bool delay : {false, true}) {
    Module module = make({.trainable = true, .delay = delay, .columnwise_at_start = true});
    for (int step = 0; step < 2; ++step)
      module.step();
    expect_usage(module, kBoth);
    for (const TestWeight& w : module.weights) {
      const bool ran = module.kind != ModuleKind::kGroupedLinear || &w != &module.weights[1];
      EXPECT_EQ(testing::largest(testing::widened(bench.download<float>(w.gradient))) > 0, ran);
    }
  }
}

TEST_P(ReleaseOf, UpstreamCase16AColumnwiseOnlyWeightIsLeftAlone) {
  Module module = make({.columnwise_at_start = true});
  Module::Saved saved;
  module.forward(&saved, bench.ctx);
  for (TestWeight& w : module.weights)
    w.matrix->update_usage(false, std::nullopt, bench.ctx);
  module.backward(saved, bench.ctx);
  expect_usage(module, {.rowwise = false, .columnwise = true});
}

// What cannot be made again from the rowwise copy is never dropped: groups of one row, and MX.
TEST_P(ReleaseOf, UpstreamCase17And23OtherGroupingsAreNeverDropped) {
  for (const Grouping grouping : {Grouping::k1x128, Grouping::kMx1x32}) {
    SCOPED_TRACE(to_string(grouping));
    Module module = make({.columnwise_at_start = true, .grouping = grouping});
    for (int step = 0; step < 2; ++step) {
      module.step();
      expect_usage(module, kBoth);
    }
  }
}

TEST_P(ReleaseOf, UpstreamCase18To19WorkspacesOfBf16WeightsAreCachedOverMicroBatches) {
  for (const bool trainable : {false, true}) {
    SCOPED_TRACE(trainable ? "trainable" : "frozen");
    Module released = make({.trainable = trainable, .workspace = true});
    Module resident =
        make({.trainable = trainable, .workspace = true, .policy = ColumnwisePolicy::kResident});
    for (int step = 0; step < 3; ++step) {
      for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
        const uint64_t before = released.weights[0].workspace->matrix.version();
        EXPECT_EQ(difference(released.step(), resident.step()), "");
        const uint64_t after = released.weights[0].workspace->matrix.version();
        EXPECT_EQ(after - before, micro_batch == 0 ? 1u : 0u) << "later ones reuse the workspace";
      }
      for (const Module* module : {&released, &resident}) {
        for (size_t i = 0; i < module->weights.size(); ++i) {
          const TestWeight& w = module->weights[i];
          if (module->kind == ModuleKind::kGroupedLinear && i == 1)
            continue;  // no token, no workspace
          const bool kept = trainable || module == &resident;
          EXPECT_EQ(w.usage(), kept ? kBoth : kRowwise);
          EXPECT_EQ(w.workspace->matrix.columnwise_bytes() > 0, kept) << "the buffer, not a handle";
        }
      }
      // The optimiser wrote the masters.
      for (Module* module : {&released, &resident}) {
        for (TestWeight& w : module->weights) {
          const int64_t n = w.weight.n, k = w.weight.k;
          const std::vector<bf16> values = testing::tiled_values(n, k, 1000 + step, 0.05);
          copy(w.master, ConstView(values.data(), DType::kBF16, {n, k}, kHost), bench.stream);
          bench.stream.synchronize();
          ++w.weight.version;
        }
      }
    }
  }
}

TEST_P(ReleaseOf, UpstreamCase20RecomputeIsReleasedAtTheEnd) {
  for (const bool workspace : {false, true}) {
    Module plain = make({.lora = true, .workspace = workspace});
    const NamedBytes want = plain.step();
    Module module = make({.lora = true, .workspace = workspace});
    for (int step = 0; step < 2; ++step) {
      module.clear();
      module.forward(nullptr, bench.ctx);
      EXPECT_EQ(module.columnwise_now(), 0) << "the phase without gradients makes none";
      Module::Saved saved;
      module.forward(&saved, bench.ctx);
      EXPECT_EQ(module.columnwise_now(), 0);
      module.backward(saved, bench.ctx);
      EXPECT_EQ(module.columnwise_now(), 0);
      EXPECT_EQ(difference(module.results(), want), "");
    }
  }
}

// -- what was untested there

TEST_P(ReleaseOf, BiasDoesNotBringAColumnwiseDy) {
  // Same peak of everything with and without a bias: its gradient is a sum over dy.
  const auto peak = [&](bool bias) {
    Module module = make({.bias = bias});
    module.step();
    module.clear();
    bench.arena.reset_peak();
    const int64_t before = bench.arena.total().now;
    module.run(false, bench.ctx);
    return bench.arena.total().peak - before;
  };
  const int64_t column_sums = 64 * 512 * 4;  // scratch of the sum itself
  EXPECT_LE(peak(true), peak(false) + column_sums);
  Module module = make({.bias = true});
  for (const Linear& linear : module.linears()) {
    const LinearPlan plan = plan_of(linear, true, true, false, bench.ctx);
    EXPECT_EQ(plan.dy8, kRowwise);
    EXPECT_EQ(plan.x8, kRowwise);
    EXPECT_EQ(plan.saves_x8, Usage{});
    EXPECT_FALSE(plan.saves_x);
  }
}

// Under every form of backward: a bias trains beside a frozen weight as it does beside a trained
// one.
TEST_P(ReleaseOf, ABiasGradientDoesNotNeedTheWeightsOwn) {
  for (const auto how : {BackwardOverride::kNone, BackwardOverride::kHighPrecision,
                         BackwardOverride::kDequantized}) {
    for (const bool fp8 : {true, false}) {
      Module frozen = make({.bias = true, .fp8 = fp8, .backward_override = how});
      Module trained = make(
          {.bias = true, .trainable = true, .delay = true, .fp8 = fp8, .backward_override = how});
      NamedBytes got = frozen.step(), want = trained.step();
      for (size_t i = 0; i < frozen.weights.size(); ++i) {
        const std::string name = message(frozen.weights[i].weight.name, i, " bias_gradient");
        EXPECT_EQ(got[name], want[name]) << name;
        const bool ran = frozen.kind != ModuleKind::kGroupedLinear || i != 1;
        EXPECT_EQ(testing::largest(
                      testing::widened(bench.download<float>(frozen.weights[i].bias_gradient))) > 0,
                  ran);
      }
    }
  }
}

TEST_P(ReleaseOf, ABuildWithBothCopiesLosesTheSecondInTheFirstBackward) {
  Module module = make({.columnwise_at_start = true});
  Module lean = make({});
  EXPECT_EQ(difference(module.step(), lean.step()), "");
  expect_usage(module, kRowwise);
  EXPECT_EQ(module.columnwise_now(), 0);
  // And the next forward does not bring it back: the peak is that of a lean build.
  for (Module* m : {&module, &lean}) {
    m->clear();
    bench.arena.reset_peak();
    m->run(false, bench.ctx);
    EXPECT_EQ(bench.arena.bytes(Category::kColumnwise).peak, module.largest_codes());
  }
}

TEST_P(ReleaseOf, FrozenAfterTrainingReleasesFromTheNextBackwardOn) {
  for (const bool workspace : {false, true}) {
    Module module = make({.trainable = true, .workspace = workspace});
    module.step();
    EXPECT_GT(module.columnwise_now(), 0);
    for (TestWeight& w : module.weights)
      w.set_trainable(false);
    module.options.trainable = false;
    module.step();
    EXPECT_EQ(module.columnwise_now(), 0);
    for (TestWeight& w : module.weights)
      w.set_trainable(true);
    module.options.trainable = true;
    const NamedBytes again = module.step();
    Module fresh = make({.trainable = true, .workspace = workspace});
    EXPECT_EQ(difference(again, fresh.step()), "");
  }
}

// Frozen is asked of the backward: a weight that was trainable in its forward may be frozen in its
// backward, and then has no gradient and is released.
TEST_P(ReleaseOf, FreezingBetweenForwardAndBackwardCounts) {
  Module module = make({.trainable = true, .columnwise_at_start = true});
  module.clear();
  Module::Saved saved;
  module.forward(&saved, bench.ctx);
  for (TestWeight& w : module.weights)
    w.set_trainable(false);
  module.backward(saved, bench.ctx);
  EXPECT_EQ(module.columnwise_now(), 0);
  for (const TestWeight& w : module.weights)
    EXPECT_EQ(testing::largest(testing::widened(bench.download<float>(w.gradient))), 0);
}

TEST_P(ReleaseOf, TheEnvironmentTogglesThePolicyBetweenSteps) {
  Module module = make({});
  const NamedBytes want = module.step();
  for (const char* name :
       {"ROWSHARD_RELEASE_FROZEN_WEIGHT_COLUMNWISE", "NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE"}) {
    {
      const ScopedVariable off(name, "0");
      EXPECT_EQ(difference(module.step(), want), "");
      EXPECT_GT(module.columnwise_now(), 0) << name;
    }
    EXPECT_EQ(difference(module.step(), want), "");
    EXPECT_EQ(module.columnwise_now(), 0);
    module.options.policy = ColumnwisePolicy::kResident;
    {
      const ScopedVariable on(name, "1");
      EXPECT_EQ(difference(module.step(), want), "");
      EXPECT_EQ(module.columnwise_now(), 0) << name;
    }
    module.options.policy = ColumnwisePolicy::kRelease;
  }
  const ScopedVariable wrong("ROWSHARD_RELEASE_FROZEN_WEIGHT_COLUMNWISE", "yes");
  Module::Saved saved;
  EXPECT_THROW(module.forward(&saved, bench.ctx), ConfigError);
}

TEST_P(ReleaseOf, ValidationBetweenStepsLeavesTheCopiesAsTheyAre) {
  for (const auto policy : {ColumnwisePolicy::kRelease, ColumnwisePolicy::kResident}) {
    Module module = make({.policy = policy});
    const NamedBytes want = module.step();
    const int64_t before = module.columnwise_now();
    module.forward(nullptr, bench.ctx);
    EXPECT_EQ(module.columnwise_now(), before);
    EXPECT_EQ(difference(module.step(), want), "");
  }
}

TEST_P(ReleaseOf, SeveralMicroBatchesBackToBackAccumulateTheSameGradients) {
  Module released = make({.lora = true});
  Module resident = make({.lora = true, .policy = ColumnwisePolicy::kResident});
  std::vector<NamedBytes> results;
  for (Module* module : {&released, &resident}) {
    module->clear();
    // Forwards first, then all backwards, as a pipeline schedule runs them.
    std::vector<Module::Saved> saved(3);
    for (auto& s : saved)
      module->forward(&s, bench.ctx);
    for (auto& s : saved)
      module->backward(s, bench.ctx);
    results.push_back(module->results());
  }
  EXPECT_EQ(difference(results[0], results[1]), "");
  EXPECT_EQ(released.columnwise_now(), resident.columnwise_now()) << "one arena for both";
  EXPECT_EQ(released.weights[0].usage(), kRowwise);
}

TEST_P(ReleaseOf, ScratchIsAtTheSameAddressInEveryStep) {
  // Under release no copy has memory between steps; a step that repeats takes the same blocks
  // again, so the arena asks the system for nothing.
  Module module = make({});
  module.step();
  module.step();
  const auto probe = [&] {
    const int64_t bytes = module.largest_codes();
    return bench.arena.allocate(Category::kColumnwise, "probe", bytes).data();
  };
  const std::byte* address = probe();
  for (int step = 0; step < 3; ++step) {
    module.step();
    EXPECT_EQ(probe(), address);
  }
}

// 16 frozen layers as in `rowshard bench stack`, in small: release is below resident by exactly the
// codes of all columnwise copies but the one that dgrad is reading.
TEST(ReleaseStack, BytesAreTheColumnwiseCodes) {
  const int64_t features = 256, layers = 6;
  for (const bool columnwise_at_start : {false, true}) {
    std::vector<CategoryBytes> seen;
    for (const auto policy : {ColumnwisePolicy::kRelease, ColumnwisePolicy::kResident}) {
      Bench bench;
      std::vector<std::unique_ptr<Module>> stack;
      for (int64_t i = 0; i < layers; ++i) {
        stack.push_back(
            std::make_unique<Module>(bench, ModuleKind::kLinear,
                                     ModuleOptions{.hidden = features,
                                                   .ffn = features,
                                                   .columnwise_at_start = columnwise_at_start,
                                                   .policy = policy}));
      }
      for (int step = 0; step < 2; ++step) {
        if (step == 1)
          bench.arena.reset_peak();
        for (auto& module : stack)
          module->step();
      }
      seen.push_back(bench.arena.bytes(Category::kColumnwise));
    }
    EXPECT_EQ(seen[0].now, 0);
    EXPECT_EQ(seen[0].peak, features * features);
    EXPECT_EQ(seen[1].now, layers * features * features);
    EXPECT_EQ(seen[1].peak, layers * features * features);
  }
}

}  // namespace
}  // namespace rowshard
