#include "model/merge.h"

#include <cstring>

#include "core/error.h"
#include "file_fixture.h"
#include "model/checkpoint.h"
#include "model/peft_adapter.h"
#include "model/quantize_checkpoint.h"

namespace rowshard::testing {
namespace {

using nlohmann::json;

const std::string kQ = "model.layers.1.self_attn.q_proj";  // [192, 192]
const std::string kDown = "model.layers.0.mlp.down_proj";  // [192, 320]

struct Lora {
  std::vector<float> a, b;
  int64_t out, in;
};

Lora factors(int64_t out, int64_t in, float size, uint64_t seed) {
  Lora lora{{}, {}, out, in};
  const Philox random{seed, 2};
  for (int64_t i = 0; i < 4 * in; ++i)
    lora.a.push_back(random.normal(i));
  for (int64_t i = 0; i < out * 4; ++i)
    lora.b.push_back(size * random.normal(100'000 + i));
  return lora;
}

void write_lora(const std::filesystem::path& path,
                const std::vector<std::pair<std::string, const Lora*>>& modules) {
  AdapterConfig config;
  config.r = 4;
  config.alpha = 6;
  config.base_model = "org/base";
  std::vector<AdapterTensor> tensors;
  for (const auto& [module, lora] : modules) {
    config.target_modules.push_back(module.substr(module.rfind('.') + 1));
    tensors.push_back({module, ConstView(lora->a.data(), DType::kF32, {4, lora->in}, kHost),
                       ConstView(lora->b.data(), DType::kF32, {lora->out, 4}, kHost)});
  }
  write_adapter(path, config, tensors);
}

/// W' must be bf16 of W + 1.5 B A up to the f32 rounding of the sum.
void expect_merged(const Checkpoint& base, const Checkpoint& merged, const std::string& module,
                   const Lora& lora) {
  const std::string name = module + ".weight";
  const auto before = base.read_rows_dequantized(name, 0, lora.out);
  ASSERT_EQ(merged.tensors().at(name).tag, "BF16");
  const auto after = merged.read_f32(name);
  int64_t changed = 0;
  for (int64_t i = 0; i < lora.out; ++i) {
    for (int64_t j = 0; j < lora.in; ++j) {
      double update = 0, size = 0;
      for (int64_t r = 0; r < 4; ++r) {
        const double term = static_cast<double>(lora.b[i * 4 + r]) * lora.a[r * lora.in + j];
        update += term;
        size += std::abs(term);
      }
      const double exact = before[i * lora.in + j] + 1.5 * update;
      // bf16 has 8 significant bits: half a step is at most 2^-8 of the value. The f32 sum comes
      // before it.
      const double bound =
          std::abs(exact) * 0x1p-8 + (std::abs(before[i * lora.in + j]) + 1.5 * size) * 0x1p-21;
      ASSERT_NEAR(after[i * lora.in + j], exact, bound) << module << " [" << i << ", " << j << "]";
      changed += after[i * lora.in + j] != before[i * lora.in + j];
    }
  }
  EXPECT_GT(changed, lora.out * lora.in / 2);
}

TEST(Merge, AddsTheUpdateToBf16AndFp8Bases) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  auto tensors = tiny_tensors(config);
  write_tiny_model(directory / "bf16", config, tensors);
  write_bytes(directory / "bf16/tokenizer.json", "{}");
  quantize_checkpoint(directory / "bf16", directory / "fp8");
  const Lora q = factors(192, 192, 0.1f, 1), down = factors(192, 320, 0.1f, 2);
  write_lora(directory / "adapter", {{kQ, &q}, {kDown, &down}});
  for (const char* kind : {"bf16", "fp8"}) {
    const std::filesystem::path out = directory / message("merged-", kind);
    MergeOptions options;
    options.max_shard_bytes = 300'000;
    const MergeSummary summary =
        merge_checkpoint(directory / kind, directory / "adapter", out, options);
    EXPECT_GT(summary.files, 1);
    EXPECT_NEAR(summary.update_kept, 1, 0.01);
    const Checkpoint base = Checkpoint::open(directory / kind);
    const Checkpoint merged = Checkpoint::open(out);
    EXPECT_FALSE(merged.config().fp8.has_value());
    EXPECT_FALSE(merged.has_fp8());
    EXPECT_EQ(merged.tensors().names().size(), tensors.size());  // no scale left
    expect_merged(base, merged, kQ, q);
    expect_merged(base, merged, kDown, down);
    for (const NamedTensor& tensor : tensors) {
      const std::string& name = tensor.spec.name;
      if (name == kQ + ".weight" || name == kDown + ".weight")
        continue;
      const auto values = merged.read_f32(name);
      auto expected = base.read_rows_dequantized(name, 0, tensor.spec.dims[0]);
      for (float& value : expected)
        value = static_cast<float>(bf16(value));
      EXPECT_EQ(values, expected) << name;
    }
    EXPECT_EQ(read_json_file(out / "config.json"), config);
    EXPECT_EQ(read_text_file(out / "tokenizer.json"), "{}");
  }
}

TEST(Merge, AnUpdateTooSmallForBf16IsReported) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  write_tiny_model(directory / "base", config, tiny_tensors(config));
  const Lora tiny = factors(192, 192, 1e-6f, 1);
  write_lora(directory / "adapter", {{kQ, &tiny}});
  const auto summary =
      merge_checkpoint(directory / "base", directory / "adapter", directory / "out");
  EXPECT_LT(summary.update_kept, 0.8);
  EXPECT_GE(summary.update_kept, 0);
}

TEST(Merge, AnAdapterOfAnotherBaseIsRefused) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  write_tiny_model(directory / "base", config, tiny_tensors(config));
  const auto merge = [&] {
    return config_error(
        [&] { merge_checkpoint(directory / "base", directory / "adapter", directory / "out"); });
  };
  const Lora lora = factors(192, 192, 1, 1);
  write_lora(directory / "adapter", {{"model.layers.2.self_attn.q_proj", &lora}});
  const std::string error = merge();
  EXPECT_MENTIONS(error, "model.layers.2.self_attn.q_proj is no linear layer");
  EXPECT_MENTIONS(error, "org/base");
  write_lora(directory / "adapter", {{kDown, &lora}});
  EXPECT_MENTIONS(merge(), "adapts a weight [192, 192], and that of");
  EXPECT_FALSE(std::filesystem::exists(directory / "out"));
}

}  // namespace
}  // namespace rowshard::testing
