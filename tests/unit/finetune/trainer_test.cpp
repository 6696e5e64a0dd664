// The training loop on one rank: what it computes, what it writes, and what it refuses. What needs
// ranks is in tests/distributed.
#include "finetune/trainer.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "finetune/memory_plan.h"
#include "test_device.h"
#include "training_fixture.h"

namespace rowshard {
namespace {

using testing::Curve;
using testing::TinyRun;

class TrainerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::write_tokens(directory / "train.safetensors", 31);
    testing::write_tokens(directory / "eval.safetensors", 5);
  }
  FinetuneOptions options() const {
    FinetuneOptions options = testing::tiny_options("llama_fp8", directory / "train.safetensors", 1,
                                                    testing::test_device);
    options.max_steps = 4;
    options.warmup_steps = 1;
    return options;
  }
  std::vector<nlohmann::json> metrics(const std::filesystem::path& output) const {
    std::ifstream in(output / "metrics.jsonl");
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(in, line);)
      lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  testing::TemporaryDirectory directory;
  std::unique_ptr<World> world = World::create(LaunchEnvironment{}, testing::test_device.kind);
};

struct Recorder : Reporter {
  void line(const std::string& text) override { lines.push_back(text); }
  void step(const StepMetrics& metrics, const ProgressState&) override {
    losses.push_back(metrics.loss);
  }
  void eval(const EvalMetrics& metrics) override { evals.push_back(metrics.eval_loss); }
  std::vector<std::string> lines;
  std::vector<double> losses, evals;
};

// One step by hand: gradients summed over the micro-batches, then the optimiser.
TEST_F(TrainerTest, LossIsTheMeanOverTheGlobalBatchsTokens) {
  TinyRun run(*world, options());
  TinyRun by_hand(*world, options());
  Context& ctx = by_hand.job.context();
  const Batches& batches = by_hand.trainer.batches();
  const Tensor sum = ctx.arena.tensor(Category::kWorkspace, "sum", DType::kF64, Shape{1});
  fill_bytes(sum, 0, ctx.stream);
  int64_t tokens = 0;
  for (int64_t k = 0; k < 12; ++k) {
    const MicroBatch host = batches.micro_batch({}, 0, k);
    const DeviceBatch batch(host.input_ids, host.labels, host.cu_seqlens, ctx);
    tokens += batch.labelled();
    by_hand.job.model().evaluate(batch, &by_hand.trainer.adapters(), sum);
  }
  const double want = by_hand.job.reduce_sum(sum) / static_cast<double>(tokens);
  const StepMetrics first = run.trainer.train_step();
  EXPECT_EQ(first.tokens, tokens);
  EXPECT_EQ(first.step, 1);
  EXPECT_NEAR(first.loss, want, 1e-6 * want);
  EXPECT_GT(first.grad_norm, 0);
  EXPECT_EQ(first.wire_bytes, 0) << "one rank talks to nobody";
  EXPECT_GT(first.tokens_per_second, 0);
}

// What is stepped on is the gradient of the loss that is reported: its norm is the slope along it.
TEST_F(TrainerTest, GradientIsTheSlopeOfTheReportedLoss) {
  if (testing::test_device.is_cuda())
    GTEST_SKIP() << "differences of the loss drown in bf16 activations";
  FinetuneOptions asked = options();
  asked.model = testing::golden_model("llama");
  asked.execution.recipe = Recipe::kBf16;
  TinyRun run(*world, asked);
  AdapterSet& adapters = run.trainer.adapters();
  const std::vector<float> start = run.download(adapters.parameters());
  const double norm = run.trainer.train_step().grad_norm;
  const std::vector<float> gradient = run.download(adapters.gradients());
  Context& ctx = run.job.context();
  const auto loss_at = [&](double distance) {
    std::vector<float> moved = start;
    for (size_t i = 0; i < moved.size(); ++i)
      moved[i] += static_cast<float>(distance / norm * gradient[i]);
    const Shape shape = adapters.parameters().shape;
    copy(adapters.parameters(), ConstView(moved.data(), DType::kF32, shape, kHost), ctx.stream);
    adapters.refresh_compute(ctx.stream);
    const Tensor sum = ctx.arena.tensor(Category::kWorkspace, "sum", DType::kF64, Shape{1});
    fill_bytes(sum, 0, ctx.stream);
    for (int64_t k = 0; k < 12; ++k) {
      const MicroBatch host = run.trainer.batches().micro_batch({}, 0, k);
      const DeviceBatch batch(host.input_ids, host.labels, host.cu_seqlens, ctx);
      run.job.model().evaluate(batch, &adapters, sum);
    }
    return run.job.reduce_sum(sum) / run.trainer.batches().valid_tokens({});
  };
  // Fourth order in the distance, so that neither curvature nor f32 takes more than 1e-4.
  const double h = 0.02;
  const double slope =
      (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h);
  EXPECT_NEAR(slope, norm, 1e-3 * norm);
}

// The split of the 12 rows into micro-batches changes sums in their last bits only.
TEST_F(TrainerTest, AccumulationAndMicroBatchesAreOneBatch) {
  if (testing::test_device.is_cuda())
    GTEST_SKIP() << "activations are bf16, rows of another batch round otherwise";
  FinetuneOptions asked = options();
  asked.model = testing::golden_model("llama");
  asked.execution.recipe = Recipe::kBf16;
  const Curve twelve_by_one = testing::train(*world, asked, 4);
  asked.micro_batch_size = 4;
  asked.grad_accum = 3;
  const Curve three_by_four = testing::train(*world, asked, 4);
  EXPECT_LE(testing::largest_relative_difference(three_by_four.losses, twelve_by_one.losses), 1e-5);
  EXPECT_LE(testing::largest_relative_difference(three_by_four.norms, twelve_by_one.norms), 1e-4);
}

TEST_F(TrainerTest, PaddingChangesNoLossAndNoGradient) {
  if (testing::test_device.is_cuda())
    GTEST_SKIP() << "products of another size round otherwise";
  FinetuneOptions asked = options();
  asked.model = testing::golden_model("llama");
  asked.execution.recipe = Recipe::kBf16;
  const Curve as_they_come = testing::train(*world, asked, 4);
  asked.pad_to = 16;
  const Curve padded = testing::train(*world, asked, 4);
  EXPECT_LE(testing::largest_relative_difference(padded.losses, as_they_come.losses), 1e-5);
  EXPECT_LE(testing::largest_relative_difference(padded.norms, as_they_come.norms), 1e-4);
}

TEST_F(TrainerTest, GradientThatIsNotFiniteStopsTheRunAndChangesNothing) {
  TinyRun run(*world, options());
  run.trainer.train_step();
  const std::vector<float> before = run.download(run.trainer.adapters().parameters());
  std::vector<float> broken = before;
  broken[0] = std::numeric_limits<float>::infinity();
  const ConstView values(broken.data(), DType::kF32, run.trainer.adapters().parameters().shape,
                         kHost);
  copy(run.trainer.adapters().parameters(), values, run.job.context().stream);
  run.trainer.adapters().refresh_compute(run.job.context().stream);
  run.job.context().stream.synchronize();
  try {
    run.trainer.train_step();
    FAIL() << "a step with a gradient that is not finite";
  } catch (const Error& error) {
    EXPECT_MENTIONS(std::string(error.what()), "step 2: the gradient norm is");
  }
  EXPECT_EQ(run.download(run.trainer.adapters().parameters()), broken);
  EXPECT_EQ(run.trainer.step(), 1);
}

TEST_F(TrainerTest, ResumeRefusesAnotherSeedAndALongerRun) {
  FinetuneOptions asked = options();
  {
    TinyRun run(*world, asked);
    for (int i = 0; i < 3; ++i)
      run.trainer.train_step();
    run.trainer.save(directory / "c");
  }
  asked.seed = 43;
  TinyRun other_seed(*world, asked);
  EXPECT_MENTIONS(testing::config_error([&] { other_seed.trainer.resume(directory / "c"); }),
                  "--seed 42, this run has 43");
  asked = options();
  asked.max_steps = 2;
  TinyRun shorter(*world, asked);
  EXPECT_MENTIONS(testing::config_error([&] { shorter.trainer.resume(directory / "c"); }),
                  "at step 3, beyond this run's 2");
  asked = options();
  asked.lora.r = 2;
  TinyRun smaller(*world, asked);
  EXPECT_MENTIONS(testing::config_error([&] { smaller.trainer.resume(directory / "c"); }),
                  "--lora-r");
}

TEST_F(TrainerTest, RunWritesMetricsAdapterAndCheckpoints) {
  FinetuneOptions asked = options();
  asked.eval_data = (directory / "eval.safetensors").string();
  asked.eval_every = 2;
  asked.save_every = 1;
  asked.keep = 2;
  asked.output_dir = (directory / "out").string();
  asked.trace = (directory / "trace.json").string();
  Recorder recorder;
  run_finetune(*world, asked, recorder);
  asked.trace.clear();
  EXPECT_EQ(testing::list(directory / "out"),
            (std::vector<std::string>{"adapter", "checkpoint-3", "checkpoint-4", "metrics.jsonl"}));
  ASSERT_EQ(recorder.losses.size(), 4u);
  EXPECT_EQ(recorder.evals.size(), 3u) << "before, after step 2, after the last";
  const auto lines = metrics(asked.output_dir);
  ASSERT_EQ(lines.size(), 7u);
  EXPECT_EQ(lines[0].at("eval_loss"), recorder.evals[0]);
  EXPECT_EQ(lines[1].at("loss").get<double>(), recorder.losses[0]) << "every digit";
  EXPECT_GT(lines[1].at("memory").at("rowwise_shard"), 0);
  std::map<std::string, int> spans;
  const auto trace = nlohmann::json::parse(std::ifstream(directory / "trace.json"));
  for (const auto& event : trace.at("traceEvents"))
    spans[event.at("name")] += event.at("ph") == "X";
  EXPECT_EQ(spans["block 1 backward"], 4 * asked.grad_accum) << "four steps";
  EXPECT_EQ(spans["model.layers.0.mlp.down_proj dgrad"], 4 * asked.grad_accum);
  EXPECT_EQ(spans["rebuild"], 4 * asked.grad_accum * (14 - 3))
      << "not below the first block's o_proj";
  EXPECT_EQ(spans["reduce gradients"], 4);

  // Killed after step 3 and started again: the last line is the same to the bit.
  std::filesystem::remove_all(directory / "out/checkpoint-4");
  std::filesystem::remove_all(directory / "out/adapter");
  asked.resume = "auto";
  Recorder again;
  run_finetune(*world, asked, again);
  ASSERT_EQ(again.losses.size(), 1u);
  EXPECT_EQ(again.losses[0], recorder.losses[3]);
  EXPECT_EQ(again.evals, std::vector<double>{recorder.evals[2]});
  const auto resumed = metrics(asked.output_dir);
  ASSERT_EQ(resumed.size(), 7u);
  EXPECT_EQ(resumed[5].at("loss"), lines[5].at("loss"));
  EXPECT_TRUE(std::filesystem::exists(directory / "out/adapter/adapter_model.safetensors"));
}

TEST_F(TrainerTest, DryRunWritesNothing) {
  FinetuneOptions asked = options();
  asked.dry_run = true;
  Recorder recorder;
  run_finetune(*world, asked, recorder);
  EXPECT_TRUE(recorder.losses.empty());
  EXPECT_FALSE(std::filesystem::exists(asked.output_dir));
}

TEST_F(TrainerTest, EvaluateOfASavedAdapterIsTheTrainersOwn) {
  FinetuneOptions asked = options();
  TinyRun run(*world, asked);
  for (int i = 0; i < 2; ++i)
    run.trainer.train_step();
  run.trainer.save_adapter(directory / "adapter");
  const TokenFile data = TokenFile::open(directory / "eval.safetensors", 131);
  const EvalBatches batches(data, run.trainer.batches().options(),
                            run.job.config().max_position_embeddings);
  const EvalMetrics own = run.trainer.evaluate(batches);
  EvaluateOptions evaluate;
  evaluate.model = asked.model;
  evaluate.adapter = (directory / "adapter").string();
  evaluate.data = (directory / "eval.safetensors").string();
  evaluate.execution = asked.execution;
  evaluate.packing = false;
  Recorder quiet;
  const EvalMetrics read = run_evaluate(*world, evaluate, quiet);
  EXPECT_EQ(read.eval_loss, own.eval_loss);
  EXPECT_EQ(read.eval_tokens, own.eval_tokens);
  evaluate.adapter.clear();
  EXPECT_NE(run_evaluate(*world, evaluate, quiet).eval_loss, own.eval_loss);
}

// Without data the plan takes full micro-batches: never less than with data.
TEST_F(TrainerTest, PlanWithoutDataIsTheUpperBound) {
  FinetuneOptions asked = options();
  asked.seq_len = 64;
  const MemoryPlan with_data = plan_memory(asked, testing::test_device.kind);
  asked.data.clear();
  const MemoryPlan without = plan_memory(asked, testing::test_device.kind);
  EXPECT_EQ(without.tokens, 64);
  EXPECT_GT(with_data.tokens, 16);
  for (int i = 0; i < kCategoryCount; ++i) {
    EXPECT_EQ(without.categories[i].steady, with_data.categories[i].steady);
    EXPECT_GE(without.categories[i].peak, with_data.categories[i].peak);
  }
  EXPECT_GT(without.categories[int(Category::kWorkspace)].peak, 0);
}

}  // namespace
}  // namespace rowshard
