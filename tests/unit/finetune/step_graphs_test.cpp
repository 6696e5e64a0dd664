// Recorded steps: the bits of eager ones, through whatever else happens between steps. The host has
// no graphs; what it can tell is tested here too.
#include "finetune/step_graphs.h"

#include <gtest/gtest.h>

#include <set>

#include "core/log.h"
#include "finetune/synthetic_run.h"
#include "layers/attention.h"
#include "test_device.h"
#include "training_fixture.h"

namespace rowshard {
namespace {

using testing::Curve;
using testing::TinyRun;

class StepGraphsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::write_tokens(directory / "train.safetensors", 31);
    testing::write_tokens(directory / "eval.safetensors", 5);
  }
  FinetuneOptions options(bool cuda_graph = false) const {
    FinetuneOptions options = testing::tiny_options("llama_fp8", directory / "train.safetensors", 1,
                                                    testing::test_device);
    options.warmup_steps = 1;
    options.cuda_graph = cuda_graph;
    return options;
  }

  testing::TemporaryDirectory directory;
  std::unique_ptr<World> world = World::create(LaunchEnvironment{}, testing::test_device.kind);
};

// Another micro-batch at the addresses of the first gives what a new one gives.
TEST_F(StepGraphsTest, AnAssignedBatchIsAsGoodAsNew) {
  TinyRun run(*world, options());
  Context& ctx = run.job.context();
  const auto loss = [&](const DeviceBatch& batch) {
    const Tensor sum = ctx.arena.tensor(Category::kWorkspace, "sum", DType::kF64, Shape{1});
    fill_bytes(sum, 0, ctx.stream);
    run.job.model().evaluate(batch, nullptr, sum);
    return run.job.reduce_sum(sum);
  };
  const std::vector<int32_t> ids{5, 9, 2, 7, 1, 30}, others{8, 3, 90, 4, 4, 11};
  const std::vector<int32_t> labels{-100, 2, 7, -100, 30, -100}, moved{3, 90, -100, 4, -100, -100};
  const DeviceBatch fresh(others, moved, {0, 2, 6}, ctx);
  DeviceBatch batch(ids, labels, {0, 3, 6}, ctx);
  EXPECT_NE(loss(batch), loss(fresh));
  const void* const address = batch.ids().data;
  batch.assign(others, moved, {0, 2, 6}, ctx.stream);
  EXPECT_EQ(batch.ids().data, address);
  EXPECT_EQ(loss(batch), loss(fresh));
  EXPECT_EQ(batch.segments().bounds(), (std::vector<int32_t>{0, 2, 6}));
  EXPECT_THROW(batch.assign(ids, {-100, 2, 7, -100, 30, 1}, {0, 3, 6}, ctx.stream), ShapeError);
  EXPECT_THROW(batch.assign({5, 9}, {9, -100}, {0, 2}, ctx.stream), ShapeError);
}

TEST_F(StepGraphsTest, TheHostSaysThatThereAreNone) {
  if (testing::test_device.is_cuda())
    GTEST_SKIP() << "cuda has graphs";
  EXPECT_MENTIONS(testing::config_error([&] { TinyRun(*world, options(true)); }),
                  "--cuda-graph true: the host has no graphs");
}

class RecordedSteps : public StepGraphsTest {
 protected:
  void SetUp() override {
    if (!testing::test_device.is_cuda())
      GTEST_SKIP() << "the host has no graphs";
    StepGraphsTest::SetUp();
  }
  EvalMetrics evaluate(TinyRun& run) {
    const TokenFile data = TokenFile::open(directory / "eval.safetensors", 131);
    const EvalBatches batches(data, run.trainer.batches().options(),
                              run.job.config().max_position_embeddings);
    return run.trainer.evaluate(batches);
  }
  /// Twelve steps, with an evaluation after each third.
  Curve train(TinyRun& run) {
    Curve curve;
    for (int i = 0; i < 4; ++i) {
      testing::continue_curve(curve, run, 3);
      curve.losses.push_back(evaluate(run).eval_loss);
    }
    return curve;
  }
};

TEST_F(RecordedSteps, HaveTheBitsOfEagerOnesInEveryMode) {
  const auto plain = [](FinetuneOptions&) {};
  const std::pair<const char*, std::function<void(FinetuneOptions&)>> modes[] = {
      {"release", plain},
      {"kept", [](auto& o) { o.execution.columnwise = ColumnwisePolicy::kResident; }},
      {"direct", [](auto& o) { o.execution.columnwise = ColumnwisePolicy::kDirect; }},
      {"resident units",
       [](auto& o) {
         o.execution.reshard_after_forward = parse_reshard_after_forward("resident");
       }},
      {"dropout", [](auto& o) { o.lora.dropout = 0.3; }},
      {"recompute", [](auto& o) { o.recompute = Recompute::kBlock; }},
      {"packed",
       [](auto& o) {
         o.packing = true;
         o.seq_len = 64;
         o.grad_accum = 3;
       }},
      {"padded", [](auto& o) { o.pad_to = 16; }},
      {"bf16",
       [](auto& o) {
         o.model = testing::golden_model("qwen3");
         o.execution.recipe = Recipe::kBf16;
       }},
  };
  for (const auto& [name, change] : modes) {
    SCOPED_TRACE(name);
    FinetuneOptions asked = options();
    change(asked);
    TinyRun eager(*world, asked);
    const Curve want = train(eager);
    asked.cuda_graph = true;
    TinyRun recorded(*world, asked);
    EXPECT_EQ(testing::difference(train(recorded), want), "");
    // Our own attention, which these heads take, depends on tokens only.
    std::map<std::pair<int64_t, int64_t>, int64_t> shapes;
    DataPosition position;
    for (int step = 0; step < 12; ++step) {
      for (int64_t k = 0; k < asked.grad_accum; ++k) {
        const MicroBatch batch = eager.trainer.batches().micro_batch(position, 0, k);
        ++shapes[{batch.tokens(), batch.head_tokens}];
      }
      position = eager.trainer.batches().advance(position);
    }
    int64_t again = 0, micro_batches = 0;
    for (const auto& [shape, times] : shapes) {
      again += times > 1;
      micro_batches += times;
    }
    const StepGraphs& graphs = *recorded.trainer.graphs();
    ASSERT_GT(again, 0);
    EXPECT_EQ(graphs.recorded(), again);
    EXPECT_EQ(graphs.replayed(), micro_batches - static_cast<int64_t>(shapes.size()))
        << "every one but the first of its shape";
    EXPECT_EQ(recorded.now(Category::kColumnwise), eager.now(Category::kColumnwise));
    EXPECT_EQ(recorded.now(Category::kWorkspace), eager.now(Category::kWorkspace));
  }
}

TEST_F(RecordedSteps, ResumeAndAChangedPlanRecordAgain) {
  TinyRun eager(*world, options());
  Curve want;
  testing::continue_curve(want, eager, 12);
  Curve curve;
  {
    TinyRun first(*world, options(true));
    testing::continue_curve(curve, first, 5);
    first.trainer.save(directory / "c");
    testing::continue_curve(curve, first, 1);  // saving has used the gradients' memory
  }
  curve.losses.pop_back();
  curve.norms.pop_back();
  TinyRun second(*world, options(true));
  second.trainer.resume(directory / "c");
  testing::continue_curve(curve, second, 4);
  EXPECT_GT(second.trainer.graphs()->recorded(), 0);
  const int64_t replayed = second.trainer.graphs()->replayed();
  EXPECT_GT(replayed, 0);
  PlanPolicy plan = second.job.model().options().plan;
  plan.reshard = ReshardMode::kResident;
  second.job.model().set_plan(plan);
  testing::continue_curve(curve, second, 1);
  EXPECT_EQ(second.trainer.graphs()->replayed(), replayed) << "every shape was new again";
  testing::continue_curve(curve, second, 2);
  EXPECT_EQ(testing::difference(curve, want), "");
}

TEST_F(RecordedSteps, AGradientThatIsNotFiniteChangesNothing) {
  TinyRun run(*world, options(true));
  for (int i = 0; i < 8; ++i)
    run.trainer.train_step();
  ASSERT_GT(run.trainer.graphs()->replayed(), 0);
  const View& parameters = run.trainer.adapters().parameters();
  std::vector<float> broken = run.download(parameters);
  broken[0] = std::numeric_limits<float>::infinity();
  copy(parameters, ConstView(broken.data(), DType::kF32, parameters.shape, kHost),
       run.job.context().stream);
  run.trainer.adapters().refresh_compute(run.job.context().stream);
  EXPECT_THROW(run.trainer.train_step(), Error);
  EXPECT_EQ(run.download(parameters), broken);
  EXPECT_EQ(run.trainer.step(), 8);
}

// 51 shapes in turn: the limit is reached, said, and the others run as usual.
TEST_F(RecordedSteps, TheNumberOfShapesIsLimited) {
  testing::write_tokens(directory / "train.safetensors", 102);
  static std::vector<std::string> said;
  said.clear();
  set_log_sink([](const std::string& line) { said.push_back(line); });
  Curve want;
  TinyRun eager(*world, options());
  testing::continue_curve(want, eager, 20);
  TinyRun run(*world, options(true));
  Curve curve;
  testing::continue_curve(curve, run, 20);
  set_log_sink({});
  EXPECT_EQ(testing::difference(curve, want), "");
  EXPECT_EQ(run.trainer.graphs()->recorded(), StepGraphs::kMostShapes);
  EXPECT_EQ(std::ranges::count(said,
                               "cuda graphs: micro-batches of further shapes run without "
                               "one, which is slower"),
            1);
}

// Packings of the same tokens share a graph where cuDNN's calls are the same, with heads it takes.
TEST_F(RecordedSteps, PackingsShareAGraph) {
  SyntheticOptions sizes;
  sizes.model.hidden_size = 256;
  sizes.model.intermediate_size = 384;
  sizes.model.layers = 2;
  sizes.model.heads = 4;
  sizes.model.kv_heads = 2;
  sizes.model.head_dim = 64;
  sizes.model.vocab_size = 512;
  sizes.model.rms_norm_eps = 1e-5;
  sizes.model.rope.theta = 10000;
  sizes.tokens = 384;
  sizes.execution.device = DeviceChoice::kCuda;
  struct Run {
    SyntheticRun run;
    Tensor loss_sum;
    std::optional<StepGraphs> graphs;

    Run(World& world, const SyntheticOptions& options, bool graph) : run(world, options) {
      Context& ctx = run.job().context();
      loss_sum = ctx.arena.tensor(Category::kOptimizer, "loss", DType::kF64, {1});
      if (graph)
        graphs.emplace(run.job(), run.adapters(), run.optimizer(), loss_sum);
    }
    std::pair<double, double> step(const MicroBatch& batch, int64_t number) {
      Context& ctx = run.job().context();
      fill_bytes(run.adapters().gradients(), 0, ctx.stream);
      fill_bytes(loss_sum, 0, ctx.stream);
      const double lr = 1e-3 * static_cast<double>(number);
      if (graphs) {
        graphs->train(batch, 1.0 / 300, Dropout{});
        graphs->update(lr, number);
      } else {
        run.job().model().train(
            run.job().model().batch(batch.input_ids, batch.labels, batch.cu_seqlens),
            run.adapters(), 1.0 / 300, loss_sum, Dropout{});
        run.optimizer().update(lr, number);
      }
      return {run.job().reduce_sum(loss_sum), run.optimizer().gradient_norm()};
    }
  };
  Run eager(*world, sizes, false), recorded(*world, sizes, true);
  const std::vector<std::vector<int32_t>> packings{
      {0, 300, 384}, {0, 84, 384},       {0, 384}, {0, 290, 384}, {0, 128, 256, 384},
      {0, 257, 384}, {0, 128, 256, 384}, {0, 384}, {0, 60, 384},  {0, 128, 256, 384}};
  std::set<double> losses;
  for (size_t i = 0; i < packings.size(); ++i) {
    SCOPED_TRACE(i);
    MicroBatch batch;
    batch.cu_seqlens = packings[i];
    for (int64_t t = 0; t < sizes.tokens; ++t) {
      batch.input_ids.push_back(static_cast<int32_t>((t * 37 + i * 101) % 512));
      // 300 labels, elsewhere in every batch.
      const bool labelled = (t + static_cast<int64_t>(i) * 50) % sizes.tokens < 300;
      batch.labels.push_back(labelled ? static_cast<int32_t>((t * 91 + i) % 512) : kIgnoreLabel);
      batch.head_tokens += labelled;
    }
    const auto want = eager.step(batch, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(recorded.step(batch, static_cast<int64_t>(i) + 1), want);
    losses.insert(want.first);
  }
  EXPECT_EQ(losses.size(), packings.size()) << "every batch is another";
  EXPECT_EQ(recorded.run.parameters(), eager.run.parameters());
  // Three layouts: two segments with one beyond 256, one segment, three equal tiles. Without cuDNN
  // all of them are one shape.
  const int64_t layouts = attention_layout({0, 384}, 4, 2, 64).empty() ? 1 : 3;
  EXPECT_EQ(recorded.graphs->recorded(), layouts);
  EXPECT_EQ(recorded.graphs->replayed(), static_cast<int64_t>(packings.size()) - layouts);
}

}  // namespace
}  // namespace rowshard
