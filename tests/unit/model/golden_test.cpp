// Whole models against transformers and peft: tiny Hugging Face directories with an adapter that
// stock peft saved, token losses and adapter gradients that PyTorch's autograd computed in float64,
// every sample alone (tests/parity/make_golden.py; docs/parity.md). Here the samples are packed, so
// a token that sees another sample changes every number after it.
//
// On cuda activations are bf16 and the bounds are those of bf16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "comm/world.h"
#include "model/decoder_model.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::test_device;

constexpr int32_t kIgnored = -100;
constexpr const char* kLinearNames[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                        "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
                                        "mlp.down_proj"};

double total(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values)
    sum += value;
  return sum;
}

struct Golden {
  std::filesystem::path directory;
  Checkpoint checkpoint;
  Adapter adapter;
  SafetensorsFile expected;
  std::vector<int32_t> ids, labels, bounds, rows;  // labels shifted; rows: positions with a label

  explicit Golden(const std::string& name)
      : directory(std::filesystem::path(ROWSHARD_SOURCE_DIR) / "tests/parity/golden" / name),
        checkpoint(Checkpoint::open(directory)),
        adapter(read_adapter(directory / "adapter")),
        expected(SafetensorsFile::open(directory / "expected.safetensors")) {
    const auto tokens = SafetensorsFile::open(directory / "tokens.safetensors");
    ids = tokens.read_all<int32_t>("input_ids");
    const auto stored = tokens.read_all<int32_t>("labels");
    for (int64_t offset : tokens.read_all<int64_t>("sample_offsets"))
      bounds.push_back(static_cast<int32_t>(offset));
    for (size_t segment = 0; segment + 1 < bounds.size(); ++segment) {
      labels.insert(labels.end(), stored.begin() + bounds[segment] + 1,
                    stored.begin() + bounds[segment + 1]);
      labels.push_back(kIgnored);
    }
    for (size_t i = 0; i < labels.size(); ++i) {
      if (labels[i] != kIgnored)
        rows.push_back(static_cast<int32_t>(i));
    }
  }
  std::vector<double> losses(const std::string& key) const {
    return expected.read_all<double>(key);
  }
};

// One rank with a model, its adapter and one packed micro-batch.
struct OneRank {
  OneRank(const Golden& golden_, bool fp8) : golden(golden_) {
    DecoderOptions options;
    options.linear = fp8 ? Storage::kFp8Block : Storage::kPlain;
    options.activations = test_device.is_host() ? DType::kF32 : DType::kBF16;
    world = World::create(LaunchEnvironment{}, test_device.kind);
    gather = world->communicator("gather");
    const ModelConfig& config = golden.checkpoint.config();
    model = std::make_unique<DecoderModel>(config, options, *gather, bench.ctx);
    model->load(golden.checkpoint);
    adapters = std::make_unique<AdapterSet>(config, golden.adapter.config, 1, options.activations,
                                            0, bench.ctx);
    adapters->load(golden.adapter, bench.ctx);
    batch = std::make_unique<DeviceBatch>(golden.ids, golden.labels, golden.bounds, bench.ctx);
    loss_sum = bench.upload(std::vector<double>{0.0}, {1});
  }

  double read_loss() { return bench.download<double>(loss_sum)[0]; }
  double evaluate(const AdapterSet* with) {
    fill_bytes(loss_sum, 0, bench.stream);
    model->evaluate(*batch, with, loss_sum);
    return read_loss();
  }
  /// Σ loss; leaves gradients of the mean.
  double train() {
    fill_bytes(loss_sum, 0, bench.stream);
    fill_bytes(adapters->gradients(), 0, bench.stream);
    const double scale = 1.0 / static_cast<double>(golden.rows.size());
    model->train(*batch, *adapters, scale, loss_sum, Dropout{});
    return read_loss();
  }
  /// Loss of every trained token, made here from the logits.
  std::vector<double> token_losses(const AdapterSet* with) {
    const auto count = static_cast<int64_t>(golden.rows.size());
    const int64_t vocabulary = golden.checkpoint.config().vocab_size;
    const Tensor rows = bench.upload(golden.rows, {count});
    const Tensor logits =
        bench.arena.tensor(Category::kActivations, "logits", DType::kF32, {count, vocabulary});
    model->logits(*batch, with, rows, logits);
    const std::vector<float> z = bench.download<float>(logits);
    std::vector<double> losses;
    for (int64_t i = 0; i < count; ++i) {
      const float* row = &z[i * vocabulary];
      const double top = *std::max_element(row, row + vocabulary);
      double sum = 0;
      for (int64_t v = 0; v < vocabulary; ++v)
        sum += std::exp(row[v] - top);
      losses.push_back(std::log(sum) + top - row[golden.labels[golden.rows[i]]]);
    }
    return losses;
  }

  const Golden& golden;
  Bench bench;
  std::unique_ptr<World> world;
  std::unique_ptr<Communicator> gather;
  std::unique_ptr<DecoderModel> model;
  std::unique_ptr<AdapterSet> adapters;
  std::unique_ptr<DeviceBatch> batch;
  Tensor loss_sum;
};

enum class Norm { kLargest, kEuclidean };

/// The largest difference of any factor's gradient from `prefix`gradient.*, relative to that
/// gradient: by largest elements, or by Euclidean norms.
double gradient_difference(OneRank& run, const std::string& prefix, Norm norm) {
  double worst = 0;
  int factors = 0;
  for (int64_t layer = 0; layer < run.golden.checkpoint.config().layers; ++layer) {
    for (int index = 0; index < kLinearCount; ++index) {
      const LoraFactors* lora = run.adapters->factors(layer, index);
      if (!lora) {
        ADD_FAILURE() << kLinearNames[index] << " of layer " << layer << " has no adapter";
        continue;
      }
      for (const auto& [view, letter] : {std::pair(lora->grad_a, "A"), {lora->grad_b, "B"}}) {
        const std::string key = message(prefix, "gradient.base_model.model.", layer_prefix(layer),
                                        kLinearNames[index], ".lora_", letter, ".weight");
        const std::vector<float> want = run.golden.expected.read_all<float>(key);
        const std::vector<float> got = run.bench.download<float>(view);
        if (want.size() != got.size()) {
          ADD_FAILURE() << key << " has " << want.size() << " elements, not " << got.size();
          continue;
        }
        double difference = 0, size = 0;
        for (size_t i = 0; i < want.size(); ++i) {
          const double d = std::abs(double{got[i]} - want[i]), w = std::abs(double{want[i]});
          EXPECT_FALSE(std::isnan(d)) << key;
          difference = norm == Norm::kLargest ? std::max(difference, d) : difference + d * d;
          size = norm == Norm::kLargest ? std::max(size, w) : size + w * w;
        }
        const double relative = difference / size;
        worst = std::max(worst, norm == Norm::kLargest ? relative : std::sqrt(relative));
        ++factors;
      }
    }
  }
  EXPECT_EQ(factors, 2 * kLinearCount * run.golden.checkpoint.config().layers);
  return worst;
}

class GoldenModel : public ::testing::TestWithParam<const char*> {
 protected:
  // f32 against f64: two blocks are some hundred roundings of 2^-24 deep; transformers itself keeps
  // norms and angles in f32. Seen: 5e-6 of the largest element of a factor's gradient.
  const bool host_ = test_device.is_host();
  const double loss_bound_ = host_ ? 1e-5 : 1e-2;
  const double token_bound_ = host_ ? 2e-5 : 5e-2;
  // bf16 activations: on qwen2's small random heads the host differs by 0.067, an H200 by 0.100.
  const double gradient_bound_ = host_ ? 5e-5 : 0.15;
  const Norm norm_ = host_ ? Norm::kLargest : Norm::kEuclidean;
};

TEST_P(GoldenModel, EveryTokensLoss) {
  const Golden golden(GetParam());
  OneRank run(golden, false);
  for (const bool adapted : {false, true}) {
    const auto want = golden.losses(adapted ? "token_losses" : "base_token_losses");
    const auto got = run.token_losses(adapted ? run.adapters.get() : nullptr);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_NEAR(got[i], want[i], token_bound_ * (1 + want[i]))
          << "token " << golden.rows[i] << (adapted ? " with" : " without") << " the adapter";
    }
  }
}

TEST_P(GoldenModel, EvaluatedLoss) {
  const Golden golden(GetParam());
  OneRank run(golden, false);
  const double base = total(golden.losses("base_token_losses"));
  const double adapted = total(golden.losses("token_losses"));
  EXPECT_NEAR(run.evaluate(nullptr), base, loss_bound_ * base);
  EXPECT_NEAR(run.evaluate(run.adapters.get()), adapted, loss_bound_ * adapted);
}

TEST_P(GoldenModel, TrainingLossAndGradients) {
  const Golden golden(GetParam());
  OneRank run(golden, false);
  const double want = total(golden.losses("token_losses"));
  EXPECT_NEAR(run.train(), want, loss_bound_ * want);
  EXPECT_LE(gradient_difference(run, "", norm_), gradient_bound_);
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenModel, ::testing::Values("llama", "qwen2", "qwen3"),
                         [](const auto& info) { return std::string(info.param); });

// A native block-FP8 checkpoint with arbitrary f32 scales and partial blocks. There are two
// references.
//
// The one under fp8.* sends activations and output gradients through e4m3 in groups of 128, as
// here, so nothing is left but f32 against f64. But where that puts one value on the other side of
// a rounding tie, its code is off by 6 %, and gradients below it by some per cent: about every
// second run has such a value. So the same step is run with adapters that differ in the last bits,
// and the closest one counts; half of them agree to 1e-5.
TEST(GoldenFp8Model, ClosestOfSomeRunsIsTheEmulatedOne) {
  if (!test_device.is_host())
    GTEST_SKIP() << "activations are bf16 on cuda, where most runs round some value otherwise";
  constexpr int kRuns = 32;
  const Golden golden("llama_fp8");
  OneRank run(golden, true);
  const double want = total(golden.losses("fp8.token_losses"));
  double closest = INFINITY, loss = NAN;
  for (int attempt = 0; attempt < kRuns; ++attempt) {
    Adapter adapter = golden.adapter;
    std::mt19937 random(attempt);
    for (AdapterModule& module : adapter.modules) {
      for (float& value : module.a)
        value *= 1 + 0x1p-23f * (static_cast<float>(random() % 9) - 4);
    }
    run.adapters->load(adapter, run.bench.ctx);
    const double this_loss = run.train();
    const double difference = gradient_difference(run, "fp8.", Norm::kEuclidean);
    EXPECT_NEAR(this_loss, want, 1e-2 * want);
    EXPECT_LE(difference, 0.2);
    if (difference < closest) {
      closest = difference;
      loss = this_loss;
    }
  }
  EXPECT_LE(closest, 1e-4);
  EXPECT_NEAR(loss, want, 1e-5 * want);
}

// The other reference computes with the dequantised weights and rounds nothing else: what FP8
// activations cost. A code is off by up to 2^-4 of its value, 2.6 % in the mean square; 14 linear
// layers, forward and backward, leave 13 to 32 % in the gradients of these random weights
// (PyTorch's emulation against its exact run), and 0.4 % in the loss.
TEST(GoldenFp8Model, NearTheUnroundedActivations) {
  const Golden golden("llama_fp8");
  ASSERT_TRUE(golden.checkpoint.has_fp8());
  OneRank run(golden, true);
  const double loss = run.train();
  const double want = total(golden.losses("token_losses"));
  EXPECT_NEAR(loss, want, 2e-2 * want);
  EXPECT_LE(gradient_difference(run, "", Norm::kEuclidean), 0.4);
  EXPECT_NEAR(run.evaluate(run.adapters.get()), loss, 1e-5 * loss);
  const double base = total(golden.losses("base_token_losses"));
  EXPECT_NEAR(run.evaluate(nullptr), base, 2e-2 * base);
}

}  // namespace
}  // namespace rowshard
