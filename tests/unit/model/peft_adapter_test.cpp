#include "model/peft_adapter.h"

#include "core/error.h"
#include "file_fixture.h"

namespace rowshard::testing {
namespace {

using nlohmann::json;

struct Factors {
  std::vector<float> a, b;
  int64_t in, out, r;

  Factors(int64_t in_, int64_t out_, int64_t r_, uint64_t seed) : in(in_), out(out_), r(r_) {
    const Philox random{seed, 1};
    for (int64_t i = 0; i < r * in; ++i)
      a.push_back(random.normal(i));
    for (int64_t i = 0; i < out * r; ++i)
      b.push_back(random.normal(r * in + i) * 1e-3f);
  }
  AdapterTensor tensor(const std::string& module) const {
    return {module, ConstView(a.data(), DType::kF32, {r, in}, kHost),
            ConstView(b.data(), DType::kF32, {out, r}, kHost)};
  }
};

AdapterConfig config_of(int r) {
  AdapterConfig config;
  config.r = r;
  config.alpha = 2 * r;
  config.target_modules = {"v_proj", "down_proj", "v_proj"};
  config.base_model = "org/base \"model\"";
  return config;
}

const std::string kV = "model.layers.10.self_attn.v_proj", kDown = "model.layers.2.mlp.down_proj";

void write_example(const std::filesystem::path& path, DType dtype = DType::kF32) {
  write_adapter(path, config_of(4),
                {Factors(6, 3, 4, 1).tensor(kV), Factors(5, 7, 4, 2).tensor(kDown)}, dtype);
}

TEST(PeftAdapter, TheFilesHavePeftsNamesAndKeys) {
  TemporaryDirectory directory;
  write_example(directory / "adapter");
  EXPECT_EQ(list(directory.path()), (std::vector<std::string>{"adapter"}));
  EXPECT_EQ(
      list(directory / "adapter"),
      (std::vector<std::string>{"README.md", "adapter_config.json", "adapter_model.safetensors"}));
  const SafetensorsFile file =
      SafetensorsFile::open(directory / "adapter/adapter_model.safetensors");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  std::map<std::string, std::string> found;
  for (const auto& [name, info] : file.tensors())
    found[name] = info.describe();
  EXPECT_EQ(found, (std::map<std::string, std::string>{
                       {"base_model.model." + kV + ".lora_A.weight", "F32 [4, 6]"},
                       {"base_model.model." + kV + ".lora_B.weight", "F32 [3, 4]"},
                       {"base_model.model." + kDown + ".lora_A.weight", "F32 [4, 5]"},
                       {"base_model.model." + kDown + ".lora_B.weight", "F32 [7, 4]"}}));
  // The order of the file, not of a parsed object.
  const std::string text = read_text_file(directory / "adapter/adapter_config.json");
  const auto config = nlohmann::ordered_json::parse(text);
  std::vector<std::string> keys;
  for (const auto& [key, value] : config.items())
    keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"alpha_pattern",
                                            "auto_mapping",
                                            "base_model_name_or_path",
                                            "bias",
                                            "exclude_modules",
                                            "fan_in_fan_out",
                                            "inference_mode",
                                            "init_lora_weights",
                                            "layers_pattern",
                                            "layers_to_transform",
                                            "loftq_config",
                                            "lora_alpha",
                                            "lora_bias",
                                            "lora_dropout",
                                            "megatron_config",
                                            "megatron_core",
                                            "modules_to_save",
                                            "peft_type",
                                            "peft_version",
                                            "r",
                                            "rank_pattern",
                                            "revision",
                                            "target_modules",
                                            "target_parameters",
                                            "task_type",
                                            "trainable_token_indices",
                                            "use_dora",
                                            "use_rslora"}));
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["task_type"], "CAUSAL_LM");
  EXPECT_EQ(config["r"], 4);
  EXPECT_EQ(config["lora_alpha"].dump(), "8");
  EXPECT_EQ(config["bias"], "none");
  EXPECT_EQ(config["inference_mode"], true);
  EXPECT_TRUE(config["modules_to_save"].is_null());
  EXPECT_EQ(config["target_modules"].dump(), R"(["down_proj","v_proj"])");
  EXPECT_EQ(config["base_model_name_or_path"], "org/base \"model\"");
  EXPECT_MENTIONS(read_text_file(directory / "adapter/README.md"),
                  R"(base_model: "org/base \"model\"")");
}

TEST(PeftAdapter, RoundTripIsExactInF32AndRoundedInBf16) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    TemporaryDirectory directory;
    write_example(directory / "a", dtype);
    const Adapter adapter = read_adapter(directory / "a");
    EXPECT_EQ(adapter.config.r, 4);
    EXPECT_EQ(adapter.config.alpha, 8);
    EXPECT_EQ(adapter.config.scale(), 2);
    EXPECT_EQ(adapter.config.target_modules, (std::vector<std::string>{"down_proj", "v_proj"}));
    ASSERT_EQ(adapter.modules.size(), 2u);
    EXPECT_EQ(adapter.find("model.layers.1.mlp.down_proj"), nullptr);
    const AdapterModule* v = adapter.find(kV);
    ASSERT_NE(v, nullptr);
    const Factors expected(6, 3, 4, 1);
    EXPECT_EQ(v->in, 6);
    EXPECT_EQ(v->out, 3);
    ASSERT_EQ(v->a.size(), expected.a.size());
    for (size_t i = 0; i < v->a.size(); ++i) {
      const float value = expected.a[i];
      EXPECT_EQ(v->a[i], dtype == DType::kF32 ? value : static_cast<float>(bf16(value)));
    }
    if (dtype == DType::kF32) {
      EXPECT_EQ(v->b, expected.b);
      EXPECT_EQ(adapter.find(kDown)->a, Factors(5, 7, 4, 2).a);
    }
  }
}

TEST(PeftAdapter, RsloraScalesByTheSquareRoot) {
  AdapterConfig config = config_of(16);
  config.alpha = 8;
  EXPECT_EQ(config.scale(), 0.5);
  config.rslora = true;
  EXPECT_EQ(config.scale(), 2);
}

TEST(PeftAdapter, ASecondWriteReplacesTheFirstWhole) {
  TemporaryDirectory directory;
  write_example(directory / "a");
  write_bytes(directory / "a/left_over", "");
  write_adapter(directory / "a", config_of(2), {Factors(6, 3, 2, 1).tensor(kV)});
  EXPECT_EQ(list(directory / "a").size(), 3u);
  EXPECT_EQ(list(directory.path()).size(), 1u);
  EXPECT_EQ(read_adapter(directory / "a").config.r, 2);
}

TEST(PeftAdapter, AFailedWriteLeavesTheOldOne) {
  TemporaryDirectory directory;
  write_example(directory / "a");
  Factors diverged(6, 3, 4, 1);
  diverged.b[5] = std::nanf("");
  const std::string error =
      config_error([&] { write_adapter(directory / "a", config_of(4), {diverged.tensor(kV)}); });
  EXPECT_MENTIONS(error, "lora_B.weight has the value nan at element 5");
  EXPECT_EQ(read_adapter(directory / "a").modules.size(), 2u);
  EXPECT_EQ(list(directory.path()).size(), 1u);
}

TEST(PeftAdapter, WhatReadersWouldIgnoreIsNotWritten) {
  TemporaryDirectory directory;
  const Factors factors(6, 3, 4, 1);
  const auto write = [&](const std::string& module, int r) {
    write_adapter(directory / "a", config_of(r), {factors.tensor(module)});
  };
  EXPECT_THROW(write(kV, 8), ShapeError);
  EXPECT_THROW(write("base_model.model." + kV, 4), LogicError);
  EXPECT_THROW(write("_orig_mod." + kV, 4), LogicError);
  EXPECT_THROW(write("model.layers.0.self_attn.q_proj", 4), LogicError);  // not a target
  EXPECT_THROW(write("model.layers.0.self_attn.xv_proj", 4), LogicError);
  EXPECT_THROW(write_adapter(directory / "a", config_of(4), {}), LogicError);
  EXPECT_THROW(write_adapter(directory / "a", config_of(4), {factors.tensor(kV)}, DType::kF16),
               ConfigError);
  EXPECT_TRUE(list(directory.path()).empty());
}

// As peft 0.17 writes it, with f16 factors and a regular expression as the target.
TEST(PeftAdapter, ReadsWhatPeftWrote) {
  TemporaryDirectory directory;
  write_bytes(directory / "adapter_config.json", R"({
    "alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": "base", "bias": "none",
    "corda_config": null, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
    "inference_mode": true, "init_lora_weights": "gaussian", "layer_replication": null,
    "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 32.5,
    "lora_bias": false, "lora_dropout": 0.05, "megatron_config": null,
    "megatron_core": "megatron.core", "modules_to_save": null, "peft_type": "LORA",
    "qalora_group_size": 16, "r": 2, "rank_pattern": {}, "revision": null,
    "target_modules": ".*(q|o)_proj", "target_parameters": null, "task_type": "CAUSAL_LM",
    "trainable_token_indices": null, "use_dora": false, "use_qalora": false, "use_rslora": true,
    "a_key_of_tomorrow": 1})");
  const std::vector<f16> a{f16(1.0f), f16(-2.0f), f16(0.5f), f16(0x1p-24f)};
  const std::vector<float> b{3, 4};
  const std::string base = "base_model.model.model.layers.0.self_attn.o_proj.lora_";
  write_tensors(
      directory / "adapter_model.safetensors",
      {named(base + "A.weight", "F16", {2, 2}, a), named(base + "B.weight", "F32", {1, 2}, b)});
  const Adapter adapter = read_adapter(directory.path());
  EXPECT_EQ(adapter.config.alpha, 32.5);
  EXPECT_EQ(adapter.config.dropout, 0.05);
  EXPECT_TRUE(adapter.config.rslora);
  EXPECT_EQ(adapter.config.target_modules, (std::vector<std::string>{"o_proj"}));
  const AdapterModule* module = adapter.find("model.layers.0.self_attn.o_proj");
  ASSERT_NE(module, nullptr);
  EXPECT_EQ(module->a, (std::vector<float>{1, -2, 0.5f, 0x1p-24f}));
  EXPECT_EQ(module->b, b);
}

TEST(PeftAdapter, WhatWeCannotHonourIsNamed) {
  struct Case {
    const char* key;
    json value;
    const char* expected;
  };
  const std::vector<Case> cases{
      {"use_dora", true, "DoRA"},
      {"modules_to_save", {"lm_head"}, "modules_to_save is [\"lm_head\"]"},
      {"rank_pattern", {{"q_proj", 4}}, "one rank for all"},
      {"alpha_pattern", {{"q_proj", 4}}, "one alpha for all"},
      {"bias", "all", "bias is \"all\""},
      {"lora_bias", true, "lora_bias"},
      {"fan_in_fan_out", true, "transposed"},
      {"target_parameters", {"x"}, "bare parameters"},
      {"trainable_token_indices", {1, 2}, "token embeddings"},
      {"use_qalora", true, "QALoRA"},
      {"layer_replication", {{0, 1}}, "replicated layers"},
      {"peft_type", "IA3", "peft_type is \"IA3\""},
      {"r", 0, "r is 0"},
      {"r", "8", "r is \"8\""},
      {"lora_alpha", nullptr, "lora_alpha is null"},
  };
  for (const Case& test : cases) {
    TemporaryDirectory directory;
    write_example(directory / "a");
    json config = read_json_file(directory / "a/adapter_config.json");
    config[test.key] = test.value;
    write_bytes(directory / "a/adapter_config.json", config.dump());
    const std::string error = config_error([&] { read_adapter(directory / "a"); });
    EXPECT_MENTIONS(error, test.expected);
    EXPECT_MENTIONS(error, "adapter_config.json");
  }
}

TEST(PeftAdapter, BrokenTensorFiles) {
  const std::string base = "base_model.model.model.layers.0.self_attn.v_proj.";
  const NamedTensor a = named<float>(base + "lora_A.weight", "F32", {4, 1}, {1, 2, 3, 4});
  const NamedTensor b = named<float>(base + "lora_B.weight", "F32", {1, 4}, {1, 2, 3, 4});
  struct Case {
    std::vector<NamedTensor> tensors;
    const char* expected;
  };
  const std::vector<Case> cases{
      {{a}, "has lora_A alone"},
      {{b}, "has lora_B alone"},
      {{}, "no tensors"},
      {{a, b, named<float>("base_model.model.lm_head.weight", "F32", {1}, {1})}, "lm_head.weight"},
      {{a, b, named<float>(base + "lora_magnitude_vector", "F32", {1}, {1})}, "magnitude"},
      {{a, b, named<float>(base + "lora_A.default.weight", "F32", {1}, {1})}, "default"},
      {{a, b, named<float>("model.x.lora_A.weight", "F32", {1}, {1})}, "model.x.lora_A"},
      {{named<float>(base + "lora_A.weight", "F32", {2, 2}, {1, 2, 3, 4}), b},
       "do not have the rank r = 4"},
      {{named<int32_t>(base + "lora_A.weight", "I32", {4, 1}, {1, 2, 3, 4}), b}, "I32 [4, 1]"},
  };
  for (const Case& test : cases) {
    TemporaryDirectory directory;
    write_example(directory / "a");
    write_tensors(directory / "a/adapter_model.safetensors", test.tensors);
    EXPECT_MENTIONS(config_error([&] { read_adapter(directory / "a"); }), test.expected);
  }
  TemporaryDirectory directory;
  EXPECT_MENTIONS(config_error([&] { read_adapter(directory / "none"); }),
                  "no adapter_config.json");
  write_example(directory / "a");
  std::filesystem::remove(directory / "a/adapter_model.safetensors");
  EXPECT_MENTIONS(config_error([&] { read_adapter(directory / "a"); }),
                  "the adapter is incomplete");
  write_bytes(directory / "a/adapter_model.bin", "");
  EXPECT_MENTIONS(config_error([&] { read_adapter(directory / "a"); }), "safe_serialization");
  write_bytes(directory / "a/adapter_config.json", "{");
  EXPECT_MENTIONS(config_error([&] { read_adapter(directory / "a"); }), "no valid JSON");
}

}  // namespace
}  // namespace rowshard::testing
