// What a model or adapter directory, or a token file, holds: for people and as JSON.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace rowshard {

struct Inspection {
  struct Group {
    std::string dtype;  // tag of the file: "BF16", "F8_E4M3"
    int64_t tensors = 0;
    int64_t elements = 0;
    int64_t bytes = 0;
  };
  std::string kind;  // "model", "adapter", "tokens" (a token file) or "tensors" (another file)
  std::vector<std::pair<std::string, std::string>> facts;  // "model_type" -> "llama", in order
  std::vector<Group> groups;                               // largest first
  int64_t parameters = 0;                                  // elements, without FP8 scales

  std::string text() const;  // a table
  std::string json() const;  // one object
};

/// A directory with config.json or adapter_config.json, or one safetensors file. A model or adapter
/// we cannot use is still described, with the reason under "usable"; damaged files are a
/// ConfigError.
Inspection inspect(const std::filesystem::path& path);

}  // namespace rowshard
