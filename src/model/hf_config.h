// config.json of a Hugging Face model directory, as the facts the model code needs.
//
// Anything we would compute differently from the model's authors (another activation, an unknown
// RoPE scaling, sliding windows, another quantisation) is refused with a ConfigError that names the
// file, the key and its value. Unknown keys are ignored.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/error.h"

namespace rowshard {

/// Reads a JSON file; ConfigError with the file name when it is missing or malformed.
nlohmann::json read_json_file(const std::filesystem::path& path);

enum class ModelFamily { kLlama, kQwen2, kQwen3 };
const char* to_string(ModelFamily family);  // the model_type: "llama", …

enum class RopeType { kDefault, kLlama3 };
const char* to_string(RopeType type);  // "default", "llama3"

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  // llama3 only: wavelengths above original/low_freq_factor are stretched by `factor`, those below
  // original/high_freq_factor kept, in between interpolated.
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 1.0;
  int64_t original_max_position_embeddings = 0;
};

/// Native block FP8: quant_method "fp8", fmt "e4m3", weight_block_size [128, 128].
struct Fp8CheckpointConfig {
  int64_t block_rows = 128;
  int64_t block_cols = 128;
  std::string scale_fmt;                   // "", "float" or "ue8m0"
  std::vector<std::string> not_converted;  // modules_to_not_convert, or ignored_layers
};

/// One linear layer of a decoder layer.
struct LinearModule {
  std::string name;  // "self_attn.q_proj", …, "mlp.down_proj"
  int64_t n = 0;     // output features: rows of W
  int64_t k = 0;     // input features
  bool bias = false;
};

struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  double rms_norm_eps = 0;
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;  // on q, k and v (llama and qwen3: attention_bias; qwen2: always)
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // qwen3: RMSNorm over head_dim on q and k before RoPE
  RopeConfig rope;
  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;
  std::string dtype;  // "bfloat16", …: what the authors trained in; empty when not said
  std::optional<Fp8CheckpointConfig> fp8;

  /// Reads `directory`/config.json.
  static ModelConfig load(const std::filesystem::path& directory);
  /// `source` names the origin in messages.
  static ModelConfig parse(const nlohmann::json& json, const std::string& source);

  int64_t q_size() const { return heads * head_dim; }
  int64_t kv_size() const { return kv_heads * head_dim; }
  /// The seven linear layers of every decoder layer, in the order q, k, v, o, gate, up, down.
  std::vector<LinearModule> linears() const;
};

/// "model.layers.3." + name.
std::string layer_prefix(int64_t layer);

}  // namespace rowshard
