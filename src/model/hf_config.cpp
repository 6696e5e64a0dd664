#include "model/hf_config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/log.h"
#include "model/files.h"

namespace rowshard {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

/// Typed access to one JSON object, whose errors name file and key.
class Reader {
 public:
  Reader(const json& object, std::string source, std::string prefix = "")
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {
    ROWSHARD_CHECK(object_.is_object(), ConfigError, source_, ": ",
                   prefix_.empty() ? "the file" : prefix_, " is no JSON object");
  }

  /// Present and not null.
  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  const json& value(const char* key) const {
    ROWSHARD_CHECK(has(key), ConfigError, source_, ": key ", prefix_, key, " is missing");
    return object_.at(key);
  }
  Reader object(const char* key) const { return Reader(value(key), source_, prefix_ + key + "."); }

  int64_t positive(const char* key) const {
    const json& found = value(key);
    if (!found.is_number_integer() || found.get<int64_t>() <= 0 ||
        found.get<int64_t>() > int64_t{1} << 40) {
      refuse(key, "must be a positive integer");
    }
    return found.get<int64_t>();
  }
  int64_t positive(const char* key, int64_t otherwise) const {
    return has(key) ? positive(key) : otherwise;
  }
  double number(const char* key) const {
    const json& found = value(key);
    if (!found.is_number() || !(found.get<double>() > 0) || std::isinf(found.get<double>())) {
      refuse(key, "must be a positive number");
    }
    return found.get<double>();
  }
  double number(const char* key, double otherwise) const {
    return has(key) ? number(key) : otherwise;
  }
  bool flag(const char* key, bool otherwise) const {
    if (!has(key))
      return otherwise;
    if (!value(key).is_boolean())
      refuse(key, "must be true or false");
    return value(key).get<bool>();
  }
  std::string text(const char* key) const {
    if (!value(key).is_string())
      refuse(key, "must be a string");
    return value(key).get<std::string>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    return has(key) ? text(key) : otherwise;
  }
  /// An integer or a list of integers; empty when absent.
  std::vector<int64_t> ids(const char* key) const {
    std::vector<int64_t> result;
    if (!has(key))
      return result;
    const auto add = [&](const json& id) {
      if (!id.is_number_integer())
        refuse(key, "must be a token id or a list of them");
      result.push_back(id.get<int64_t>());
    };
    if (value(key).is_array()) {
      for (const json& id : value(key))
        add(id);
    } else {
      add(value(key));
    }
    return result;
  }
  std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> result;
    if (!has(key))
      return result;
    if (!value(key).is_array())
      refuse(key, "must be a list of strings");
    for (const json& item : value(key)) {
      if (!item.is_string())
        refuse(key, "must be a list of strings");
      result.push_back(item.get<std::string>());
    }
    return result;
  }

  /// Throws: `key` has a value we cannot honour.
  [[noreturn]] void refuse(const char* key, const std::string& advice) const {
    throw ConfigError(message(source_, ": ", prefix_, key, " is ",
                              has(key) ? value(key).dump() : "missing", ", ", advice));
  }

 private:
  const json& object_;
  std::string source_, prefix_;
};

RopeConfig parse_rope(const Reader& config) {
  RopeConfig rope;
  const auto scaling = [&](const Reader& from) {
    // Files before the rename say "type".
    const char* key = from.has("rope_type") ? "rope_type" : "type";
    const std::string type = from.text(key, "default");
    if (type == "default")
      return;
    if (type != "llama3")
      from.refuse(key, "and only default and llama3 are supported");
    rope.type = RopeType::kLlama3;
    rope.factor = from.number("factor");
    rope.low_freq_factor = from.number("low_freq_factor");
    rope.high_freq_factor = from.number("high_freq_factor");
    rope.original_max_position_embeddings = from.positive("original_max_position_embeddings");
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      from.refuse("high_freq_factor", "must be more than low_freq_factor");
    }
  };
  rope.theta = config.number("rope_theta", rope.theta);
  if (config.has("rope_parameters")) {
    const Reader parameters = config.object("rope_parameters");
    rope.theta = parameters.number("rope_theta", rope.theta);
    if (parameters.number("partial_rotary_factor", 1.0) != 1.0) {
      parameters.refuse("partial_rotary_factor", "and only 1 is supported");
    }
    scaling(parameters);
  } else if (config.has("rope_scaling")) {
    scaling(config.object("rope_scaling"));
  }
  if (config.number("partial_rotary_factor", 1.0) != 1.0) {
    config.refuse("partial_rotary_factor", "and only 1 is supported");
  }
  return rope;
}

Fp8CheckpointConfig parse_quantization(const Reader& quantization) {
  const std::string method = quantization.text("quant_method");
  if (method != "fp8") {
    quantization.refuse(
        "quant_method",
        "and only block FP8 (\"fp8\") is supported; use the bf16 checkpoint of this "
        "model, and `rowshard quantize` if it is to be stored in FP8");
  }
  if (quantization.text("fmt", "e4m3") != "e4m3") {
    quantization.refuse("fmt", "and only e4m3 is supported");
  }
  if (quantization.text("activation_scheme", "dynamic") != "dynamic") {
    quantization.refuse("activation_scheme", "and only dynamic is supported");
  }
  if (!quantization.has("weight_block_size") ||
      quantization.value("weight_block_size") != json({128, 128})) {
    quantization.refuse("weight_block_size", "and only [128, 128] is supported");
  }
  Fp8CheckpointConfig fp8;
  fp8.scale_fmt = quantization.text("scale_fmt", "");
  if (fp8.scale_fmt != "" && fp8.scale_fmt != "float" && fp8.scale_fmt != "ue8m0") {
    quantization.refuse("scale_fmt", "and only float and ue8m0 are known");
  }
  const char* key =
      quantization.has("modules_to_not_convert") ? "modules_to_not_convert" : "ignored_layers";
  fp8.not_converted = quantization.texts(key);
  return fp8;
}

}  // namespace

json read_json_file(const fs::path& path) {
  const std::string text = read_text_file(path);
  try {
    return json::parse(text);
  } catch (const json::exception& error) {
    throw ConfigError(message(path.string(), ": no valid JSON: ", error.what()));
  }
}

const char* to_string(ModelFamily family) {
  switch (family) {
    case ModelFamily::kLlama:
      return "llama";
    case ModelFamily::kQwen2:
      return "qwen2";
    case ModelFamily::kQwen3:
      return "qwen3";
  }
  return "?";
}

const char* to_string(RopeType type) {
  switch (type) {
    case RopeType::kDefault:
      return "default";
    case RopeType::kLlama3:
      return "llama3";
  }
  return "?";
}

ModelConfig ModelConfig::load(const fs::path& directory) {
  std::error_code ignored;
  ROWSHARD_CHECK(fs::is_directory(directory, ignored), ConfigError, directory.string(),
                 ": no such directory; a Hugging Face model directory is needed");
  const fs::path path = directory / "config.json";
  ROWSHARD_CHECK(fs::exists(path), ConfigError, directory.string(), ": no config.json in it",
                 fs::exists(directory / "adapter_config.json")
                     ? "; this is an adapter, give the base model as the model"
                     : "; a Hugging Face model directory is needed");
  ROWSHARD_CHECK(!fs::exists(directory / "hf_quant_config.json"), ConfigError,
                 (directory / "hf_quant_config.json").string(),
                 ": a ModelOpt quantisation, which is not supported; use the bf16 checkpoint");
  return parse(read_json_file(path), path.string());
}

ModelConfig ModelConfig::parse(const json& object, const std::string& source) {
  const Reader config(object, source);
  ModelConfig model;
  const std::string type = config.text("model_type");
  if (type == "llama") {
    model.family = ModelFamily::kLlama;
  } else if (type == "qwen2") {
    model.family = ModelFamily::kQwen2;
  } else if (type == "qwen3") {
    model.family = ModelFamily::kQwen3;
  } else {
    config.refuse("model_type", "and only llama, qwen2 and qwen3 are supported");
  }
  model.hidden_size = config.positive("hidden_size");
  model.intermediate_size = config.positive("intermediate_size");
  model.layers = config.positive("num_hidden_layers");
  model.heads = config.positive("num_attention_heads");
  // The first Llama files have no such key: every head has its own keys and values.
  model.kv_heads = model.family == ModelFamily::kLlama
                       ? config.positive("num_key_value_heads", model.heads)
                       : config.positive("num_key_value_heads");
  if (model.heads % model.kv_heads != 0) {
    config.refuse("num_key_value_heads", message("must divide num_attention_heads ", model.heads));
  }
  if (config.has("head_dim")) {
    model.head_dim = config.positive("head_dim");
  } else if (model.family == ModelFamily::kQwen3) {
    model.head_dim = 128;  // the family's default, whatever the hidden size
  } else if (model.hidden_size % model.heads == 0) {
    model.head_dim = model.hidden_size / model.heads;
  } else {
    config.refuse("head_dim", message("and hidden_size ", model.hidden_size,
                                      " is no multiple of num_attention_heads ", model.heads));
  }
  ROWSHARD_CHECK(model.head_dim % 2 == 0, ConfigError, source, ": head_dim ", model.head_dim,
                 " is odd, which RoPE cannot pair");
  model.rms_norm_eps = config.number("rms_norm_eps");
  model.vocab_size = config.positive("vocab_size");
  model.max_position_embeddings = config.positive("max_position_embeddings");
  model.tie_word_embeddings = config.flag("tie_word_embeddings", false);
  if (config.text("hidden_act", "silu") != "silu") {
    config.refuse("hidden_act", "and only silu is supported");
  }

  const bool attention_bias = config.flag("attention_bias", false);
  model.qkv_bias = model.family == ModelFamily::kQwen2 || attention_bias;
  model.o_bias = model.family != ModelFamily::kQwen2 && attention_bias;
  model.mlp_bias = model.family == ModelFamily::kLlama && config.flag("mlp_bias", false);
  model.qk_norm = model.family == ModelFamily::kQwen3;
  model.rope = parse_rope(config);

  if (config.flag("use_sliding_window", false)) {
    config.refuse("use_sliding_window", "and sliding-window attention is not supported");
  }
  for (const std::string& layer : config.texts("layer_types")) {
    if (layer != "full_attention") {
      config.refuse("layer_types", "and only full_attention is supported");
    }
  }
  // Dropout inside attention is a training habit of the first authors, not part of the model.
  if (config.has("attention_dropout") && config.value("attention_dropout") != 0) {
    log_once("attention_dropout " + source,
             message(source, ": attention_dropout ", config.value("attention_dropout").dump(),
                     " is ignored; lora dropout is an option of the job"));
  }

  const std::vector<int64_t> bos = config.ids("bos_token_id");
  if (!bos.empty())
    model.bos_token_id = bos.front();
  model.eos_token_ids = config.ids("eos_token_id");
  model.dtype = config.text(config.has("dtype") ? "dtype" : "torch_dtype", "");
  if (config.has("quantization_config")) {
    model.fp8 = parse_quantization(config.object("quantization_config"));
  }
  return model;
}

std::vector<LinearModule> ModelConfig::linears() const {
  return {{"self_attn.q_proj", q_size(), hidden_size, qkv_bias},
          {"self_attn.k_proj", kv_size(), hidden_size, qkv_bias},
          {"self_attn.v_proj", kv_size(), hidden_size, qkv_bias},
          {"self_attn.o_proj", hidden_size, q_size(), o_bias},
          {"mlp.gate_proj", intermediate_size, hidden_size, mlp_bias},
          {"mlp.up_proj", intermediate_size, hidden_size, mlp_bias},
          {"mlp.down_proj", hidden_size, intermediate_size, mlp_bias}};
}

std::string layer_prefix(int64_t layer) {
  return message("model.layers.", layer, ".");
}

}  // namespace rowshard
