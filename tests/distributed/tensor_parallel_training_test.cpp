// Fine-tuning over tensor-parallel ranks: the curve, the adapters and the bytes of one rank, in
// every mode. Models are made here, with the smallest sizes whose parts are whole FP8 blocks.
#include "distributed/dist_fixture.h"
#include "finetune/memory_plan.h"
#include "finetune/run_checkpoint.h"
#include "training_fixture.h"

namespace rowshard {
namespace {

using testing::Curve;
using testing::difference;
using testing::TinyRun;

constexpr int kVocabulary = 131;
constexpr double kCurveBound = 1e-3;  // relative, of every loss

/// Two layers of hidden 256 with an FFN of five blocks, which no number of ranks divides.
nlohmann::json config_of(int heads, int kv_heads, const char* family, int head_dim = 128) {
  nlohmann::json config = testing::tiny_config(family);
  config["hidden_size"] = 256;
  config["intermediate_size"] = 640;
  config["num_attention_heads"] = heads;
  config["num_key_value_heads"] = kv_heads;
  config["head_dim"] = head_dim;
  config["vocab_size"] = kVocabulary;
  config["max_position_embeddings"] = 576;
  return config;
}

/// Weights at the scale of a trained model's, every 128x128 tile with a magnitude of its own.
std::vector<testing::NamedTensor> weights_of(const nlohmann::json& config) {
  std::vector<testing::NamedTensor> tensors = testing::tiny_tensors(config);
  uint64_t seed = 100;
  for (testing::NamedTensor& tensor : tensors) {
    const std::vector<int64_t>& dims = tensor.spec.dims;
    const int64_t cols = dims.size() > 1 ? dims[1] : 1;
    const bool norm = tensor.spec.name.find("norm") != std::string::npos;
    const Philox random{++seed, 3};
    std::vector<bf16> values(dims[0] * cols);
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / cols, col = static_cast<int64_t>(i) % cols;
      const float scale =
          cols > 1 ? std::ldexp(1.0f / std::sqrt(static_cast<float>(cols)),
                                static_cast<int>((row / 128 * 5 + col / 128 * 3) % 3) - 1)
                   : 0.1f;
      values[i] = bf16((norm ? 1.0f : 0.0f) + scale * random.normal(i));
    }
    tensor.bytes.assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(bf16));
  }
  return tensors;
}

class TensorParallelTraining : public testing::DistributedTest {
 protected:
  void SetUp() override {
    directory_ = world().bootstrap().all_gather(own_.path().string())[0];
    if (rank() == 0) {
      testing::write_tokens(directory_ / "train.safetensors", 31, kVocabulary);
      testing::write_tokens(directory_ / "long.safetensors", 240, kVocabulary);
      testing::write_tokens(directory_ / "eval.safetensors", 5, kVocabulary);
    }
    world().barrier();
  }

  /// Rank 0 writes; the name says the heads.
  std::string model(const std::string& name, const nlohmann::json& config) {
    const std::filesystem::path path = directory_ / name;
    if (rank() == 0)
      testing::write_tiny_model(path, config, weights_of(config));
    world().barrier();
    return path.string();
  }
  /// Heads that divide over any of 1, 2, 3 and 4 ranks: 12 with 6 KV heads would be slow, so three
  /// ranks have their own.
  nlohmann::json fitting(const char* family = "llama") const {
    return size() == 3 ? config_of(6, 3, family) : config_of(4, 2, family);
  }

  FinetuneOptions options(const std::string& model_path, int tp, int dp = 1) const {
    FinetuneOptions options =
        testing::tiny_options("llama", directory_ / "train.safetensors", dp, device());
    options.model = model_path;
    options.execution.tp = tp;
    options.lora.r = 4;
    options.grad_accum = 4 / dp;
    options.lr = 1e-3;
    return options;
  }
  /// Whether two runs that sum in another order soon round independently: a last bit moves an FP8
  /// code to the other side of a tie, and bf16 activations (on cuda) everything.
  static bool rounds(Recipe recipe) { return recipe == Recipe::kBlock || device().is_cuda(); }
  /// Of the adapters' length, after ten steps at the rate of curve_options.
  static double adapter_bound(Recipe recipe) {
    if (device().is_cuda())
      return 3e-3;
    return rounds(recipe) && size() > 2 ? 2e-3 : 1e-3;
  }
  /// For curves that are compared with those of another number of ranks. Where roundings part, the
  /// mean loss differs by what they do to one token over the root of the number of tokens
  /// (docs/testing.md): steps of 1,152. Adapters differ by a fraction of how far they have moved,
  /// hence the rate.
  FinetuneOptions curve_options(Recipe recipe, const std::string& model_path, int tp,
                                int dp = 1) const {
    FinetuneOptions options = this->options(model_path, tp, dp);
    options.execution.recipe = recipe;
    if (rounds(recipe)) {
      options.data = (directory_ / "long.safetensors").string();
      options.packing = true;
      options.seq_len = 576;
      options.grad_accum = 2 / dp;
      options.lr = 1e-4;
    }
    return options;
  }
  static std::unique_ptr<World> alone() {
    LaunchEnvironment launch;
    launch.local_rank = world().launch().local_rank;
    return World::create(launch, device().kind, world().transport());
  }

  static void expect_equal_on_all_ranks(const std::vector<double>& values) {
    const std::string bits(reinterpret_cast<const char*>(values.data()),
                           values.size() * sizeof(double));
    for (const std::string& other : world().bootstrap().all_gather(bits))
      EXPECT_TRUE(other == bits) << "one number on all ranks";
  }

  testing::TemporaryDirectory own_;
  std::filesystem::path directory_;
};

struct Trained {
  Curve curve;
  std::vector<float> full;  // parameters
};

Trained train(World& world, const FinetuneOptions& options, int steps) {
  TinyRun run(world, options);
  Trained result;
  testing::continue_curve(result.curve, run, steps);
  result.full = run.job.full_vector(run.trainer.adapters(), run.trainer.adapters().parameters());
  return result;
}

/// ‖a − b‖ / ‖b − c‖: how far a is from b, measured by how far training moved b from c.
double relative_distance(const std::vector<float>& a, const std::vector<float>& b,
                         const std::vector<float>& c) {
  double apart = 0, moved = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    apart += std::pow(double{a[i]} - b[i], 2);
    moved += std::pow(double{b[i]} - c[i], 2);
  }
  return std::sqrt(apart / moved);
}

TEST_F(TensorParallelTraining, TenStepsAreThoseOfOneRank) {
  struct Case {
    const char* family;
    Recipe recipe;
    bool sequence;
    double dropout;
    int steps;
  };
  const std::vector<Case> cases{{"llama", Recipe::kBf16, true, 0.1, 10},
                                {"qwen3", Recipe::kBf16, false, 0.1, 10},
                                {"llama", Recipe::kBlock, true, 0, 10},
                                {"qwen2", Recipe::kBlock, false, 0, 4}};
  for (const Case& c : cases) {
    SCOPED_TRACE(message(c.family, " ", to_string(c.recipe), c.sequence ? " sequence" : ""));
    FinetuneOptions asked = curve_options(c.recipe, model(c.family, fitting(c.family)), size());
    asked.execution.sequence_parallel = c.sequence;
    asked.lora.dropout = c.dropout;
    const Trained run = train(world(), asked, c.steps);
    std::vector<double> shared = run.curve.losses;
    shared.insert(shared.end(), run.curve.norms.begin(), run.curve.norms.end());
    shared.insert(shared.end(), run.full.begin(), run.full.end());
    expect_equal_on_all_ranks(shared);
    if (c.steps == 10 && asked.lr == 1e-3) {
      EXPECT_LT(run.curve.losses.back(), run.curve.losses.front()) << "it learns";
    }
    if (rank() > 0)
      continue;
    asked.execution.tp = 1;
    const auto one = alone();
    const Trained reference = train(*one, asked, c.steps);
    const Trained start = train(*one, asked, 0);
    const bool parts = rounds(c.recipe);
    EXPECT_NEAR(run.curve.losses[0], reference.curve.losses[0],
                (device().is_cuda() ? kCurveBound : 1e-5) * reference.curve.losses[0]);
    EXPECT_LE(testing::largest_relative_difference(run.curve.losses, reference.curve.losses),
              kCurveBound);
    EXPECT_LE(testing::largest_relative_difference(run.curve.norms, reference.curve.norms),
              parts ? 3e-2 : 1e-3);
    // The adapters, by their own length, and by how far training moved them: Adam's first steps
    // depend on little more than signs, and so on the last bits of gradients near zero.
    const std::vector<float> zero(run.full.size(), 0.0f);
    EXPECT_LE(relative_distance(run.full, reference.full, zero), adapter_bound(c.recipe));
    EXPECT_LE(relative_distance(run.full, reference.full, start.full), device().is_cuda() ? 0.2
                                                                       : parts            ? 0.1
                                                                                          : 5e-3);
  }
}

// More ranks than KV heads: neighbours hold the same head, whose adapter is summed over them,
// counted once and saved once.
TEST_F(TensorParallelTraining, FewerKvHeadsThanRanks) {
  const int heads = size() == 3 ? 6 : 4;
  for (const Recipe recipe : {Recipe::kBf16, Recipe::kBlock}) {
    SCOPED_TRACE(to_string(recipe));
    FinetuneOptions asked =
        curve_options(recipe, model("one_kv_head", config_of(heads, 1, "llama")), size());
    const Trained run = train(world(), asked, 4);
    if (rank() > 0)
      continue;
    asked.execution.tp = 1;
    const auto one = alone();
    const Trained reference = train(*one, asked, 4);
    const std::vector<float> zero(run.full.size(), 0.0f);
    EXPECT_LE(testing::largest_relative_difference(run.curve.losses, reference.curve.losses),
              kCurveBound);
    EXPECT_LE(testing::largest_relative_difference(run.curve.norms, reference.curve.norms),
              rounds(recipe) ? 3e-2 : 1e-3);
    EXPECT_LE(relative_distance(run.full, reference.full, zero), adapter_bound(recipe));
  }
}

TEST_F(TensorParallelTraining, UnderEveryShardingOfTheSameModel) {
  if (size() != 4)
    GTEST_SKIP() << "two by two ranks";
  for (const Recipe recipe : {Recipe::kBf16, Recipe::kBlock}) {
    SCOPED_TRACE(to_string(recipe));
    FinetuneOptions asked = curve_options(recipe, model("two_by_two", fitting()), 2, 2);
    const Trained run = train(world(), asked, 10);
    expect_equal_on_all_ranks(run.curve.losses);
    asked.execution.dp_shard = 1;
    asked.execution.dp_replicate = 2;
    const Trained replicated = train(world(), asked, 10);
    EXPECT_EQ(replicated.curve.losses, run.curve.losses) << "HSDP moves the same bytes";
    if (rank() > 0)
      continue;
    const FinetuneOptions one_rank = curve_options(recipe, asked.model, 1);
    const Trained reference = train(*alone(), one_rank, 10);
    EXPECT_LE(testing::largest_relative_difference(run.curve.losses, reference.curve.losses),
              kCurveBound);
  }
}

TEST_F(TensorParallelTraining, ModesChangeNoBit) {
  using Mode = ReshardAfterForward::Mode;
  const int dp = size() == 4 ? 2 : 1;
  std::optional<Curve> first;
  for (const Mode mode : {Mode::kTrue, Mode::kFalse, Mode::kResident}) {
    for (const auto columnwise :
         {ColumnwisePolicy::kRelease, ColumnwisePolicy::kResident, ColumnwisePolicy::kDirect}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        for (const bool overlap : {true, false}) {
          if (!overlap && (mode != Mode::kTrue || recompute == Recompute::kBlock))
            continue;
          if (columnwise == ColumnwisePolicy::kDirect && recompute == Recompute::kBlock)
            continue;
          FinetuneOptions asked = options(model("modes", fitting()), size() / dp, dp);
          asked.execution.reshard_after_forward.mode = mode;
          asked.execution.columnwise = columnwise;
          asked.execution.tp_overlap = overlap;
          asked.recompute = recompute;
          asked.grad_accum = 1;
          asked.lora.dropout = 0.1;
          TinyRun run(world(), asked);
          Curve curve;
          for (int step = 0; step < 2; ++step) {
            testing::continue_curve(curve, run, 1);
            if (mode != Mode::kResident) {
              EXPECT_EQ(run.now(Category::kGathered), 0) << "every unit is a shard again";
            }
            if (columnwise != ColumnwisePolicy::kResident) {
              EXPECT_EQ(run.now(Category::kColumnwise), 0) << "every weight is released";
            }
            EXPECT_EQ(run.now(Category::kCommunication), 0);
          }
          if (!first)
            first = curve;
          EXPECT_EQ(difference(curve, *first), "")
              << "reshard " << to_string(asked.execution.reshard_after_forward) << " columnwise "
              << to_string(columnwise) << " recompute " << to_string(recompute)
              << (overlap ? " overlap" : " waits");
        }
      }
    }
  }
}

TEST_F(TensorParallelTraining, SavedRunsGoOnAtAnotherNumberOfRanks) {
  FinetuneOptions asked = options(model("saved", fitting()), size());
  asked.execution.recipe = Recipe::kBf16;
  asked.max_steps = 6;
  asked.grad_accum = 2;
  asked.lora.dropout = 0.1;
  FinetuneOptions one_rank = asked;
  one_rank.execution.tp = 1;
  Curve by_all;
  std::vector<float> full;
  {
    TinyRun run(world(), asked);
    testing::continue_curve(by_all, run, 3);
    full = run.job.full_vector(run.trainer.adapters(), run.trainer.adapters().parameters());
    run.trainer.save(directory_ / "by-all");
    run.trainer.save_adapter(directory_ / "adapter");
    testing::continue_curve(by_all, run, 3);
  }
  world().barrier();
  const std::vector<double> tail(by_all.losses.begin() + 3, by_all.losses.end());
  if (rank() == 0) {
    const auto world_alone = alone();
    TinyRun run(*world_alone, one_rank);
    run.trainer.resume(directory_ / "by-all");
    const AdapterSet& adapters = run.trainer.adapters();
    EXPECT_EQ(run.job.full_vector(adapters, adapters.parameters()), full);
    // What peft reads: every factor whole.
    AdapterSet again(run.job.config(), adapters.config(), 1, run.job.model().options().activations,
                     7, run.job.context());
    again.load(read_adapter(directory_ / "adapter"), run.job.context());
    EXPECT_EQ(run.job.full_vector(again, again.parameters()), full);
    Curve rest;
    testing::continue_curve(rest, run, 3);
    EXPECT_LE(testing::largest_relative_difference(rest.losses, tail), 1e-3);
    TinyRun other(*world_alone, one_rank);
    Curve half;
    testing::continue_curve(half, other, 3);
    other.trainer.save(directory_ / "by-one");
  }
  world().barrier();
  TinyRun run(world(), asked);
  run.trainer.resume(directory_ / "by-one");
  Curve rest;
  testing::continue_curve(rest, run, 3);
  expect_equal_on_all_ranks(rest.losses);
  EXPECT_LE(testing::largest_relative_difference(rest.losses, tail), 1e-3);
  // And on the same ranks, bit for bit.
  TinyRun same(world(), asked);
  same.trainer.resume(directory_ / "by-all");
  Curve uninterrupted;
  testing::continue_curve(uninterrupted, same, 3);
  EXPECT_EQ(uninterrupted.losses, tail);
}

TEST_F(TensorParallelTraining, EvaluationAndLogitsAreThoseOfOneRank) {
  for (const bool sequence : {true, false}) {
    FinetuneOptions asked = options(model("evaluated", fitting()), size());
    asked.execution.recipe = Recipe::kBf16;
    asked.execution.sequence_parallel = sequence;
    const TokenFile data = TokenFile::open(directory_ / "eval.safetensors", kVocabulary);
    const auto look = [&](World& of, const FinetuneOptions& with) {
      TinyRun run(of, with);
      Curve curve;
      testing::continue_curve(curve, run, 1);
      const EvalBatches batches(data, run.trainer.batches().options(),
                                run.job.config().max_position_embeddings);
      std::vector<float> values{static_cast<float>(run.trainer.evaluate(batches).eval_loss)};
      Context& ctx = run.job.context();
      const int64_t tokens = 12;
      const std::vector<int32_t> ids{5, 6, 7, 11, 3, 8, 100, 2, 1, 0, 0, 0};
      const DeviceBatch batch =
          run.job.model().batch(ids, std::vector<int32_t>(tokens, kIgnoreLabel), {0, 9, 12});
      const Tensor rows = ctx.arena.tensor(Category::kActivations, "rows", DType::kI32, Shape{2});
      const int32_t at[] = {8, 3};
      copy(rows, ConstView(at, DType::kI32, {2}, kHost), ctx.stream);
      const Tensor logits =
          ctx.arena.tensor(Category::kActivations, "logits", DType::kF32, {2, kVocabulary});
      run.job.model().logits(batch, &run.trainer.adapters(), rows, logits);
      const std::vector<float> all = run.download(logits);
      values.insert(values.end(), all.begin(), all.end());
      return values;
    };
    const std::vector<float> got = look(world(), asked);
    if (rank() > 0)
      continue;
    asked.execution.tp = 1;
    const std::vector<float> want = look(*alone(), asked);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_NEAR(got[i], want[i], 2e-3) << i;
  }
}

TEST_F(TensorParallelTraining, BytesAreThePlans) {
  using Mode = ReshardAfterForward::Mode;
  for (const bool sequence : {true, false}) {
    for (const Mode mode : {Mode::kTrue, Mode::kResident}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        FinetuneOptions asked = options(model("bytes", fitting()), size());
        asked.execution.sequence_parallel = sequence;
        asked.execution.reshard_after_forward.mode = mode;
        asked.recompute = recompute;
        asked.max_steps = 1;
        const MemoryPlan plan = plan_memory(asked, device().kind);
        SCOPED_TRACE(message(sequence ? "sequence" : "all tokens", " reshard ",
                             to_string(asked.execution.reshard_after_forward), " recompute ",
                             to_string(recompute)));
        TinyRun run(world(), asked);
        const StepMetrics metrics = run.trainer.train_step();
        // One byte a parameter over the ranks. The first rank has what does not divide.
        int64_t held = 0;
        for (const UnitLayout& unit : run.job.model().units().layouts())
          held += unit.shard_bytes();
        EXPECT_EQ(run.now(Category::kRowwiseShard), held);
        if (rank() > 0)
          continue;
        EXPECT_EQ(metrics.wire_bytes, plan.wire_bytes);
        for (int i = 0; i < kCategoryCount; ++i) {
          const auto category = static_cast<Category>(i);
          const CategoryBytes bytes = run.job.arena().bytes(category);
          EXPECT_EQ(bytes.steady, plan.categories[i].steady) << to_string(category);
          EXPECT_NEAR(bytes.peak, plan.categories[i].peak, 0.01 * plan.categories[i].peak)
              << to_string(category);
        }
      }
    }
  }
}

// x travels as codes and scales, 0.52 of bf16 (on the host, where activations are f32, 0.26), and
// never again in backward: what else travels does not depend on the recipe.
TEST_F(TensorParallelTraining, Fp8OnTheWire) {
  const auto received = [&](Recipe recipe) {
    FinetuneOptions asked = options(model("wire", fitting()), size());
    asked.execution.recipe = recipe;
    asked.execution.reshard_after_forward.mode = ReshardAfterForward::Mode::kResident;
    asked.grad_accum = 1;
    TinyRun run(world(), asked);
    const DataPosition first;
    const int64_t tokens = run.trainer.batches().micro_batch(first, 0, 0).tokens();
    return std::pair(run.trainer.train_step().wire_bytes, tokens);
  };
  const auto [fp8, tokens] = received(Recipe::kBlock);
  const auto [plain, same_tokens] = received(Recipe::kBf16);
  ASSERT_EQ(tokens, same_tokens);
  const int64_t share = tokens / size(), element = device().is_cuda() ? 2 : 4;
  // Each block gathers x twice and dy twice.
  const int64_t hidden = 256, gathers = 4 * 2;
  const int64_t saved = (element - 1) * share * hidden - 4 * round_up(share, 4) * (hidden / 128);
  EXPECT_EQ(plain - fp8, gathers * (size() - 1) * saved);
}

TEST_F(TensorParallelTraining, WhatCannotBeSplitIsRefusedBeforeAnyCollective) {
  const auto refusal = [&](const nlohmann::json& config, Recipe recipe, int tp, int64_t seq_len) {
    FinetuneOptions asked = options(model("refused", config), tp);
    asked.execution.recipe = recipe;
    asked.seq_len = seq_len;
    return testing::config_error([&] {
      check(asked);
      TinyRun run(world(), asked);
    });
  };
  const int wrong_mesh = size() + 1;
  EXPECT_MENTIONS(refusal(config_of(4, 2, "llama"), Recipe::kBlock, wrong_mesh, 0), "ranks");
  if (size() == 1)
    return;
  const std::string heads =
      refusal(config_of(size() == 3 ? 4 : 5, 1, "llama"), Recipe::kBf16, size(), 0);
  EXPECT_MENTIONS(heads, "attention heads do not divide");
  EXPECT_MENTIONS(heads, "sizes that work: 1");
  const std::string blocks =
      refusal(config_of(2 * size(), 2 * size(), "llama", 32), Recipe::kBlock, size(), 0);
  EXPECT_MENTIONS(blocks, "multiple of the FP8 block");
  EXPECT_MENTIONS(refusal(fitting(), Recipe::kBlock, size(), 12 * size() + 1), "cannot be split");
  // All ranks left in the same place: the world is as it was, and smaller blocks do as bf16.
  FinetuneOptions asked =
      options(model("refused", config_of(2 * size(), 2 * size(), "llama", 32)), size());
  asked.execution.recipe = Recipe::kBf16;
  EXPECT_GT(train(world(), asked, 1).curve.losses[0], 0);
}

}  // namespace
}  // namespace rowshard
