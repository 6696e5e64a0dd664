// Small files for tests: a directory that removes itself, raw safetensors bytes (also broken ones),
// and a two-layer model directory of any family, with sizes that are no multiple of 128.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/rng.h"
#include "model/hf_config.h"
#include "model/safetensors.h"

namespace rowshard::testing {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            message("rowshard-test-", ::getpid(), "-", count++);
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// A safetensors file with exactly this header and `data_bytes` of data.
inline std::string raw_safetensors(const std::string& header, size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 8; ++i)
    bytes += static_cast<char>(uint64_t{header.size()} >> (8 * i));
  return bytes + header + std::string(data_bytes, 'x');
}

/// Names of files and directories in `path`, hidden ones included.
inline std::vector<std::string> list(const std::filesystem::path& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// The message of the ConfigError that `call` must throw.
inline std::string config_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a ConfigError: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}
#define EXPECT_MENTIONS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "\"" << (part) << "\" not in: " << (text)

struct NamedTensor {
  TensorSpec spec;
  std::string bytes;
};

template <typename T>
NamedTensor named(const std::string& name, const char* tag, std::vector<int64_t> dims,
                  const std::vector<T>& values) {
  return {{name, tag, std::move(dims)},
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T))};
}

inline void write_tensors(const std::filesystem::path& path,
                          const std::vector<NamedTensor>& tensors,
                          std::map<std::string, std::string> metadata = {}) {
  std::vector<TensorSpec> specs;
  for (const NamedTensor& tensor : tensors)
    specs.push_back(tensor.spec);
  SafetensorsWriter writer(path, specs, std::move(metadata));
  for (const NamedTensor& tensor : tensors) {
    writer.write(tensor.spec.name, tensor.bytes.data(), static_cast<int64_t>(tensor.bytes.size()));
  }
  writer.finish();
}

/// hidden 192, 3 heads of 64 with 1 KV head, FFN 320, 11 tokens, 2 layers.
inline nlohmann::json tiny_config(const std::string& model_type) {
  return {{"architectures", {"TinyForCausalLM"}},
          {"model_type", model_type},
          {"hidden_size", 192},
          {"intermediate_size", 320},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 3},
          {"num_key_value_heads", 1},
          {"head_dim", 64},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-5},
          {"vocab_size", 11},
          {"max_position_embeddings", 64},
          {"tie_word_embeddings", false},
          {"rope_theta", 10000.0},
          {"bos_token_id", 1},
          {"eos_token_id", 2},
          {"torch_dtype", "bfloat16"}};
}

/// bf16 values of [rows, cols], every 128x128 tile of another magnitude.
inline std::vector<bf16> tile_values(int64_t rows, int64_t cols, uint64_t seed) {
  const Philox random{seed, 7};
  std::vector<bf16> values(rows * cols);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const int magnitude = static_cast<int>((row / 128 * 5 + col / 128 * 3) % 11) - 5;
      values[row * cols + col] = bf16(std::ldexp(random.normal(row * cols + col), magnitude));
    }
  }
  return values;
}

/// All tensors of the model that `config` describes, bf16.
inline std::vector<NamedTensor> tiny_tensors(const nlohmann::json& config) {
  const ModelConfig model = ModelConfig::parse(config, "tiny");
  std::vector<NamedTensor> tensors;
  const auto add = [&](const std::string& name, std::vector<int64_t> dims) {
    const int64_t rows = dims[0], cols = dims.size() > 1 ? dims[1] : 1;
    tensors.push_back(named(name, "BF16", dims, tile_values(rows, cols, tensors.size())));
  };
  add("model.embed_tokens.weight", {model.vocab_size, model.hidden_size});
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = layer_prefix(layer);
    add(prefix + "input_layernorm.weight", {model.hidden_size});
    add(prefix + "post_attention_layernorm.weight", {model.hidden_size});
    if (model.qk_norm) {
      add(prefix + "self_attn.q_norm.weight", {model.head_dim});
      add(prefix + "self_attn.k_norm.weight", {model.head_dim});
    }
    for (const LinearModule& linear : model.linears()) {
      add(prefix + linear.name + ".weight", {linear.n, linear.k});
      if (linear.bias)
        add(prefix + linear.name + ".bias", {linear.n});
    }
  }
  add("model.norm.weight", {model.hidden_size});
  if (!model.tie_word_embeddings) {
    add("lm_head.weight", {model.vocab_size, model.hidden_size});
  }
  return tensors;
}

inline NamedTensor& find(std::vector<NamedTensor>& tensors, const std::string& name) {
  for (NamedTensor& tensor : tensors) {
    if (tensor.spec.name == name)
      return tensor;
  }
  throw LogicError("no tensor " + name);
}

/// config.json and model.safetensors.
inline void write_tiny_model(const std::filesystem::path& directory, const nlohmann::json& config,
                             const std::vector<NamedTensor>& tensors) {
  std::filesystem::create_directories(directory);
  write_bytes(directory / "config.json", config.dump(2));
  write_tensors(directory / "model.safetensors", tensors);
}

inline const nlohmann::json& block_fp8_json() {
  static const nlohmann::json json = {{"quant_method", "fp8"},
                                      {"fmt", "e4m3"},
                                      {"activation_scheme", "dynamic"},
                                      {"weight_block_size", {128, 128}},
                                      {"modules_to_not_convert", {"lm_head"}}};
  return json;
}

}  // namespace rowshard::testing
