// The modules under CUDA graphs: replays give the bits of eager steps, nothing is freed or decided
// in a recording, and graphs mix with eager steps and validation. Upstream cases 21 and 22. On the
// host there are no graphs, and these tests skip; what the plan says of a recording is in
// linear_plan_test.cpp.
#include "core/graph.h"

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

TEST(Graph, OnTheHostSaysThatThereAreNone) {
  Stream stream(kHost);
  Graph graph;
  EXPECT_THROW(graph.capture(stream, [] {}), DeviceError);
  EXPECT_THROW(graph.replay(stream), LogicError);
  EXPECT_FALSE(stream.capturing());
}

class GraphOf : public ::testing::TestWithParam<ModuleKind> {
 protected:
  void SetUp() override {
    if (!testing::test_device.is_cuda())
      GTEST_SKIP() << "the host has no graphs";
  }
  Module make(const ModuleOptions& options) { return Module(bench, GetParam(), options); }

  Bench bench;
};
INSTANTIATE_TEST_SUITE_P(Modules, GraphOf, ::testing::ValuesIn(testing::kModules),
                         [](const auto& info) { return testing::to_string(info.param); });

/// A graph of one step with the arena it needs.
struct RecordedStep {
  Arena arena{testing::test_device};
  Graph graph;
  Module::Saved saved;

  RecordedStep(Module& module, bool recompute = false) {
    Context ctx{arena, module.bench.stream};
    module.run(recompute, ctx);  // caches and arena
    module.bench.stream.synchronize();
    graph.capture(module.bench.stream, [&] {
      if (recompute)
        module.forward(nullptr, ctx);
      module.forward(&saved, ctx);
      module.backward(saved, ctx);
    });
  }
  NamedBytes replay(Module& module) {
    module.clear();
    graph.replay(module.bench.stream);
    return module.results();
  }
};

/// New values where the graph's addresses are.
void rewrite_input(Module& module, int step) {
  for (const auto& [tensor, seed] : {std::pair{&module.x, 100 + step}, {&module.dy, 200 + step}}) {
    const Shape shape = tensor->shape();
    const auto values = testing::tiled_values(shape[0], shape[1], seed, 0.3);
    copy(*tensor, ConstView(values.data(), DType::kBF16, shape, kHost), module.bench.stream);
    module.bench.stream.synchronize();
  }
}

TEST_P(GraphOf, UpstreamCase21ReplaysGiveTheBitsOfEagerStepsReleasedOrResident) {
  for (const bool recompute : {false, true}) {
    for (const bool rich : {false, true}) {
      Module eager = make({.bias = rich, .lora = rich});
      Module released = make({.bias = rich, .lora = rich});
      Module resident = make({.bias = rich, .lora = rich, .policy = ColumnwisePolicy::kResident});
      resident.step();  // the copies are there before the recording
      RecordedStep with_release(released, recompute), with_copies(resident, recompute);
      EXPECT_EQ(released.weights[0].usage(), (Usage{true, false}));
      EXPECT_TRUE(resident.weights[0].matrix->columnwise_pinned());
      for (int step = 0; step < 4; ++step) {
        SCOPED_TRACE(message("recompute ", recompute, " rich ", rich, " step ", step));
        for (Module* module : {&eager, &released, &resident})
          rewrite_input(*module, step);
        const NamedBytes want = eager.step(recompute);
        EXPECT_EQ(difference(with_release.replay(released), want), "");
        EXPECT_EQ(difference(with_copies.replay(resident), want), "");
      }
      EXPECT_EQ(with_release.arena.bytes(Category::kColumnwise).now, 0);
    }
  }
}

TEST_P(GraphOf, UpstreamCase22NothingIsReleasedInARecordingThatFoundACopy) {
  Module module = make({.columnwise_at_start = true});
  Arena arena(testing::test_device);
  Context ctx{arena, bench.stream};
  Module other = make({.columnwise_at_start = true});
  other.run(false, ctx);  // warms caches and the arena, with other weights
  bench.stream.synchronize();
  Graph graph;
  Module::Saved saved;
  graph.capture(bench.stream, [&] {
    module.forward(&saved, ctx);
    module.backward(saved, ctx);
  });
  const auto first = [&](const TestWeight& w) { return w.usage().columnwise; };
  EXPECT_TRUE(first(module.weights[0]));
  Module eager = make({});
  for (int step = 0; step < 3; ++step) {
    rewrite_input(module, step);
    rewrite_input(eager, step);
    const NamedBytes want = eager.step();
    module.clear();
    graph.replay(bench.stream);
    EXPECT_EQ(difference(module.results(), want), "");
    // An eager backward in between neither frees what the graph reads nor reads what is not there.
    EXPECT_EQ(difference(module.step(), want), "");
    EXPECT_TRUE(first(module.weights[0]));
  }
  for (TestWeight& w : module.weights) {
    if (w.matrix->columnwise_pinned()) {
      EXPECT_THROW(w.matrix->update_usage(std::nullopt, false, bench.ctx), UsageError);
      w.matrix->pin_columnwise(false);
    }
  }
  module.step();
  EXPECT_FALSE(first(module.weights[0])) << "released once the graph is gone";
}

TEST_P(GraphOf, SeveralGraphsOverOneWeightMixWithEagerStepsAndValidation) {
  Module module = make({.lora = true});
  Module eager = make({.lora = true});
  RecordedStep a(module), b(module, /*recompute=*/true);
  for (int step = 0; step < 3; ++step) {
    rewrite_input(module, step);
    rewrite_input(eager, step);
    const NamedBytes want = eager.step();
    EXPECT_EQ(difference(b.replay(module), want), "");
    EXPECT_EQ(difference(module.step(), want), "") << "eager between replays";
    // Something lives in the shared arena where a careless graph would have its scratch.
    const Tensor live =
        bench.upload(std::vector<uint8_t>(module.largest_codes(), 0x5a), {module.largest_codes()});
    module.forward(nullptr, bench.ctx);  // validation
    EXPECT_EQ(difference(a.replay(module), want), "");
    EXPECT_EQ(bench.download<uint8_t>(live), std::vector<uint8_t>(module.largest_codes(), 0x5a));
  }
}

TEST_P(GraphOf, ACaptureThatWouldDecideIsRefusedAndLeavesTheStateAlone) {
  Module module = make({.policy = ColumnwisePolicy::kResident});
  Arena arena(testing::test_device);
  Context ctx{arena, bench.stream};
  module.forward(nullptr, ctx);
  Module::Saved saved;
  Graph graph;
  try {
    graph.capture(bench.stream, [&] {
      module.forward(&saved, ctx);
      module.backward(saved, ctx);
    });
    ADD_FAILURE() << "no exception";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("Run one backward before the capture"),
              std::string::npos)
        << error.what();
  }
  EXPECT_FALSE(graph.recorded());
  EXPECT_FALSE(bench.stream.capturing());
  EXPECT_EQ(module.weights[0].usage(), (Usage{true, false}));
  Module eager = make({});
  EXPECT_EQ(difference(module.step(), eager.step()), "") << "and the stream works on";
}

TEST_P(GraphOf, WorkspacesFollowTheirMasterByTheFlagOnTheDevice) {
  for (const bool trainable : {false, true}) {
    SCOPED_TRACE(trainable);
    Module module = make({.trainable = trainable, .workspace = true});
    Module eager = make({.trainable = trainable, .workspace = true});
    const Tensor flag = bench.upload(std::vector<float>{0}, {1});
    module.step();
    Arena arena(testing::test_device);
    Context ctx{arena, bench.stream};
    module.run(false, ctx);
    Graph graph;
    Module::Saved saved;
    const auto work = [&] {
      module.forward(&saved, ctx);
      module.backward(saved, ctx);
    };
    EXPECT_THROW(graph.capture(bench.stream, work), UsageError) << "no flag: a host decision";
    for (TestWeight& w : module.weights)
      w.workspace->unchanged = flag.as<float>();
    graph.capture(bench.stream, work);
    const auto set_flag = [&](float value) {
      copy(flag, ConstView(&value, DType::kF32, {1}, kHost), bench.stream);
      bench.stream.synchronize();
    };
    for (int step = 0; step < 3; ++step) {
      for (Module* m : {&module, &eager}) {
        for (size_t i = 0; i < m->weights.size(); ++i) {
          TestWeight& w = m->weights[i];
          const Shape shape{w.weight.n, w.weight.k};
          const auto values = testing::tiled_values(shape[0], shape[1], 500 + 10 * step + i, 0.05);
          copy(w.master, ConstView(values.data(), DType::kBF16, shape, kHost), bench.stream);
          bench.stream.synchronize();
          ++w.weight.version;
        }
      }
      const NamedBytes want = eager.step();
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        set_flag(micro_batch == 0 ? 0.0f : 1.0f);
        module.clear();
        graph.replay(bench.stream);
        EXPECT_EQ(difference(module.results(), want), "") << "micro-batch " << micro_batch;
      }
    }
  }
}

// A whole stack in one graph: scratch of one copy serves all layers.
TEST(GraphStack, AStackInOneGraphGivesTheBitsOfEagerSteps) {
  if (!testing::test_device.is_cuda())
    GTEST_SKIP() << "the host has no graphs";
  Bench bench;
  Arena arena(testing::test_device);
  Context ctx{arena, bench.stream};
  std::vector<std::unique_ptr<Module>> stack;
  for (int i = 0; i < 6; ++i)
    stack.push_back(std::make_unique<Module>(bench, testing::kModules[i % 4],
                                             ModuleOptions{.lora = i % 2 == 0}));
  std::vector<NamedBytes> want;
  for (auto& module : stack)
    want.push_back(module->step());
  std::vector<Module::Saved> saved(stack.size());
  const auto work = [&] {
    for (size_t i = 0; i < stack.size(); ++i)
      stack[i]->forward(&saved[i], ctx);
    for (size_t i = stack.size(); i-- > 0;)
      stack[i]->backward(saved[i], ctx);
  };
  work();
  bench.stream.synchronize();
  arena.reset_peak();
  Graph graph;
  graph.capture(bench.stream, work);
  EXPECT_EQ(arena.bytes(Category::kColumnwise).peak, 512 * 256);
  for (int replay = 0; replay < 5; ++replay) {
    for (auto& module : stack)
      module->clear();
    graph.replay(bench.stream);
    for (size_t i = 0; i < stack.size(); ++i)
      EXPECT_EQ(difference(stack[i]->results(), want[i]), "") << "layer " << i;
  }
}

}  // namespace
}  // namespace rowshard
