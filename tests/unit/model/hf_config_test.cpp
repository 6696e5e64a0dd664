#include "model/hf_config.h"

#include "core/error.h"
#include "file_fixture.h"

namespace rowshard::testing {
namespace {

using nlohmann::json;

ModelConfig parse(const json& config) {
  return ModelConfig::parse(config, "dir/config.json");
}

TEST(HfConfig, Llama31Instruct) {
  const ModelConfig model = parse(json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": false, "attention_bias": false,
    "attention_dropout": 0.0, "mlp_bias": false, "pretraining_tp": 1, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "torch_dtype": "bfloat16"})"));
  EXPECT_EQ(model.family, ModelFamily::kLlama);
  EXPECT_EQ(model.head_dim, 128);
  EXPECT_EQ(model.kv_size(), 1024);
  EXPECT_FALSE(model.qkv_bias || model.o_bias || model.mlp_bias || model.qk_norm);
  EXPECT_EQ(model.rope.type, RopeType::kLlama3);
  EXPECT_EQ(model.rope.theta, 500000);
  EXPECT_EQ(model.rope.factor, 8);
  EXPECT_EQ(model.rope.high_freq_factor, 4);
  EXPECT_EQ(model.rope.original_max_position_embeddings, 8192);
  EXPECT_EQ(model.eos_token_ids, (std::vector<int64_t>{128001, 128008, 128009}));
  EXPECT_EQ(model.bos_token_id, 128000);
  EXPECT_EQ(model.dtype, "bfloat16");
  EXPECT_FALSE(model.fp8.has_value());
  const auto linears = model.linears();
  ASSERT_EQ(linears.size(), 7u);
  EXPECT_EQ(linears[1].name, "self_attn.k_proj");
  EXPECT_EQ(linears[1].n, 1024);
  EXPECT_EQ(linears[6].name, "mlp.down_proj");
  EXPECT_EQ(linears[6].n, 4096);
  EXPECT_EQ(linears[6].k, 14336);
}

TEST(HfConfig, Qwen2AlwaysHasQkvBiasesOnly) {
  const ModelConfig model = parse(tiny_config("qwen2"));
  EXPECT_TRUE(model.qkv_bias);
  EXPECT_FALSE(model.o_bias || model.mlp_bias || model.qk_norm);
  EXPECT_TRUE(model.linears()[2].bias);
  EXPECT_FALSE(model.linears()[3].bias);
}

TEST(HfConfig, Qwen3HasNormsAndItsOwnHeadDim) {
  json config = tiny_config("qwen3");
  config.erase("head_dim");
  const ModelConfig model = parse(config);
  EXPECT_TRUE(model.qk_norm);
  EXPECT_FALSE(model.qkv_bias);
  EXPECT_EQ(model.head_dim, 128);
  EXPECT_EQ(model.q_size(), 384);  // not the hidden size
  EXPECT_EQ(model.linears()[3].k, 384);
}

TEST(HfConfig, LlamaAttentionBiasIsOnAllFour) {
  json config = tiny_config("llama");
  config["attention_bias"] = true;
  config["mlp_bias"] = true;
  const ModelConfig model = parse(config);
  EXPECT_TRUE(model.qkv_bias && model.o_bias && model.mlp_bias);
}

TEST(HfConfig, BothRopeSpellings) {
  const json llama3 = {{"factor", 32.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  json old_way = tiny_config("llama");
  old_way["rope_theta"] = 5e5;
  old_way["rope_scaling"] = llama3;
  old_way["rope_scaling"]["type"] = "llama3";
  json new_way = tiny_config("llama");
  new_way.erase("rope_theta");
  new_way["rope_parameters"] = llama3;
  new_way["rope_parameters"]["rope_type"] = "llama3";
  new_way["rope_parameters"]["rope_theta"] = 5e5;
  for (const json& config : {old_way, new_way}) {
    const RopeConfig rope = parse(config).rope;
    EXPECT_EQ(rope.type, RopeType::kLlama3);
    EXPECT_EQ(rope.theta, 5e5);
    EXPECT_EQ(rope.factor, 32);
  }
  json plain = tiny_config("llama");
  plain["rope_scaling"] = nullptr;
  plain["rope_theta"] = 1e6;
  EXPECT_EQ(parse(plain).rope.type, RopeType::kDefault);
  EXPECT_EQ(parse(plain).rope.theta, 1e6);
}

TEST(HfConfig, BlockFp8) {
  json config = tiny_config("llama");
  config["quantization_config"] = block_fp8_json();
  EXPECT_EQ(parse(config).fp8->not_converted, (std::vector<std::string>{"lm_head"}));
  config["quantization_config"].erase("modules_to_not_convert");
  config["quantization_config"]["ignored_layers"] = {"a", "b"};
  config["quantization_config"]["scale_fmt"] = "ue8m0";
  EXPECT_EQ(parse(config).fp8->not_converted, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(parse(config).fp8->scale_fmt, "ue8m0");
}

TEST(HfConfig, EveryNeededKeyIsNamedWhenMissing) {
  for (const char* key :
       {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings"}) {
    json config = tiny_config("llama");
    config.erase(key);
    EXPECT_MENTIONS(config_error([&] { parse(config); }),
                    message("dir/config.json: key ", key, " is missing"));
    config[key] = nullptr;
    EXPECT_MENTIONS(config_error([&] { parse(config); }), "is missing");
  }
  json qwen = tiny_config("qwen2");
  qwen.erase("num_key_value_heads");
  EXPECT_MENTIONS(config_error([&] { parse(qwen); }), "num_key_value_heads");
}

TEST(HfConfig, WhatWeWouldComputeDifferentlyIsRefused) {
  struct Case {
    const char* pointer;
    json value;
    const char* expected;
  };
  const std::vector<Case> cases{
      {"/model_type", "mixtral", "model_type is \"mixtral\", and only llama, qwen2 and qwen3"},
      {"/hidden_act", "gelu", "hidden_act is \"gelu\", and only silu"},
      {"/hidden_size", -1, "hidden_size is -1, must be a positive integer"},
      {"/hidden_size", 1.5, "hidden_size is 1.5"},
      {"/hidden_size", "192", "hidden_size is \"192\""},
      {"/num_key_value_heads", 2, "must divide num_attention_heads 3"},
      {"/head_dim", 63, "63 is odd"},
      {"/rms_norm_eps", 0, "rms_norm_eps is 0"},
      {"/tie_word_embeddings", "no", "must be true or false"},
      {"/eos_token_id", "x", "must be a token id"},
      {"/rope_theta", "big", "rope_theta is \"big\""},
      {"/rope_scaling", json{{"type", "yarn"}}, "rope_scaling.type is \"yarn\""},
      {"/rope_scaling", json{{"rope_type", "llama3"}}, "key rope_scaling.factor is missing"},
      {"/rope_scaling", 3, "rope_scaling. is no JSON object"},
      {"/rope_scaling",
       json{{"rope_type", "llama3"},
            {"factor", 8},
            {"low_freq_factor", 4},
            {"high_freq_factor", 4},
            {"original_max_position_embeddings", 8192}},
       "must be more than low_freq_factor"},
      {"/rope_parameters", json{{"rope_type", "dynamic"}},
       "rope_parameters.rope_type is \"dynamic\""},
      {"/partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5"},
      {"/use_sliding_window", true, "sliding-window"},
      {"/layer_types", json{"full_attention", "sliding_attention"}, "layer_types"},
      {"/quantization_config", json{{"quant_method", "compressed-tensors"}},
       "quantization_config.quant_method is \"compressed-tensors\""},
      {"/quantization_config", json{{"quant_method", "bitsandbytes"}}, "bitsandbytes"},
      {"/quantization_config", json{{"quant_method", "fp8"}}, "weight_block_size is missing"},
      {"/quantization_config", json{{"quant_method", "fp8"}, {"weight_block_size", {64, 128}}},
       "weight_block_size is [64,128], and only [128, 128]"},
      {"/quantization_config",
       json{{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}, {"fmt", "e5m2"}},
       "fmt is \"e5m2\""},
      {"/quantization_config",
       json{{"quant_method", "fp8"},
            {"weight_block_size", {128, 128}},
            {"activation_scheme", "static"}},
       "activation_scheme is \"static\""},
  };
  for (const Case& test : cases) {
    json config = tiny_config("llama");
    config[json::json_pointer(test.pointer)] = test.value;
    const std::string error = config_error([&] { parse(config); });
    EXPECT_MENTIONS(error, test.expected);
    EXPECT_MENTIONS(error, "dir/config.json");
  }
  EXPECT_MENTIONS(config_error([] { parse(json::array()); }), "no JSON object");
}

TEST(HfConfig, DirectoriesThatAreNoModels) {
  TemporaryDirectory directory;
  EXPECT_MENTIONS(config_error([&] { ModelConfig::load(directory / "none"); }),
                  "no such directory");
  EXPECT_MENTIONS(config_error([&] { ModelConfig::load(directory.path()); }), "no config.json");
  write_bytes(directory / "adapter_config.json", "{}");
  EXPECT_MENTIONS(config_error([&] { ModelConfig::load(directory.path()); }), "an adapter");
  write_bytes(directory / "config.json", "{\"model_type\": ");
  const std::string error = config_error([&] { ModelConfig::load(directory.path()); });
  EXPECT_MENTIONS(error, "no valid JSON");
  EXPECT_MENTIONS(error, (directory / "config.json").string());
  write_bytes(directory / "hf_quant_config.json", "{}");
  EXPECT_MENTIONS(config_error([&] { ModelConfig::load(directory.path()); }), "ModelOpt");
}

}  // namespace
}  // namespace rowshard::testing
