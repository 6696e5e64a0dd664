#include "model/inspect.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "model/checkpoint.h"
#include "model/peft_adapter.h"

namespace rowshard {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

std::string size_text(int64_t bytes) {
  char text[48];
  if (bytes >= int64_t{1} << 30) {
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / 0x1p30);
  } else if (bytes >= int64_t{1} << 20) {
    std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / 0x1p20);
  } else {
    std::snprintf(text, sizeof text, "%lld B", static_cast<long long>(bytes));
  }
  return text;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts)
    text += (text.empty() ? "" : ", ") + part;
  return text;
}

class Counter {
 public:
  void add(const TensorInfo& info) {
    Inspection::Group& group = groups_[info.tag];
    group.dtype = info.tag;
    ++group.tensors;
    group.elements += info.elements();
    group.bytes += info.bytes;
    if (!info.name.ends_with("_scale_inv"))
      parameters_ += info.elements();
  }
  void finish(Inspection& result) const {
    for (const auto& [tag, group] : groups_)
      result.groups.push_back(group);
    std::stable_sort(
        result.groups.begin(), result.groups.end(),
        [](const Inspection::Group& a, const Inspection::Group& b) { return a.bytes > b.bytes; });
    result.parameters = parameters_;
  }

 private:
  std::map<std::string, Inspection::Group> groups_;
  int64_t parameters_ = 0;
};

using Facts = std::vector<std::pair<std::string, std::string>>;

void add_model_facts(const ModelConfig& model, Facts& facts) {
  facts.emplace_back("model_type", to_string(model.family));
  facts.emplace_back("layers", std::to_string(model.layers));
  facts.emplace_back("hidden_size", std::to_string(model.hidden_size));
  facts.emplace_back("intermediate_size", std::to_string(model.intermediate_size));
  facts.emplace_back("heads", message(model.heads, " of ", model.head_dim, ", ", model.kv_heads,
                                      " for keys and values"));
  facts.emplace_back("vocab_size", std::to_string(model.vocab_size));
  facts.emplace_back("max_position_embeddings", std::to_string(model.max_position_embeddings));
  facts.emplace_back(
      "rope", message(to_string(model.rope.type), ", theta ", model.rope.theta,
                      model.rope.type == RopeType::kLlama3 ? message(", factor ", model.rope.factor)
                                                           : std::string()));
  facts.emplace_back("tie_word_embeddings", model.tie_word_embeddings ? "true" : "false");
  facts.emplace_back("quantization", model.fp8 ? message("block FP8 e4m3, ", model.fp8->block_rows,
                                                         "x", model.fp8->block_cols)
                                               : std::string("none"));
}

Inspection inspect_model(const fs::path& directory) {
  Inspection result;
  result.kind = "model";
  const TensorFiles files = TensorFiles::open(directory);
  Counter counter;
  for (const std::string& name : files.names())
    counter.add(files.at(name));
  counter.finish(result);
  std::string usable = "yes";
  try {
    add_model_facts(ModelConfig::load(directory), result.facts);
    Checkpoint::open(directory);
  } catch (const ConfigError& error) {
    usable = message("no: ", error.what());
    if (result.facts.empty()) {
      const json config = read_json_file(directory / "config.json");
      if (config.is_object() && config.contains("model_type") && config["model_type"].is_string()) {
        result.facts.emplace_back("model_type", config["model_type"].get<std::string>());
      }
    }
  }
  result.facts.emplace_back("files", std::to_string(files.files().size()));
  result.facts.emplace_back("usable", usable);
  return result;
}

Inspection inspect_adapter(const fs::path& directory) {
  Inspection result;
  result.kind = "adapter";
  const SafetensorsFile file = SafetensorsFile::open(directory / "adapter_model.safetensors");
  Counter counter;
  for (const auto& [name, info] : file.tensors())
    counter.add(info);
  counter.finish(result);
  try {
    const Adapter adapter = read_adapter(directory);
    const AdapterConfig& config = adapter.config;
    std::set<std::string> layers;
    for (const AdapterModule& module : adapter.modules) {
      // "model.layers.3.mlp.up_proj" -> "model.layers.3"
      size_t end = 0;
      for (int dots = 0; dots < 3 && end != std::string::npos; ++dots) {
        end = module.module.find('.', end + (dots > 0));
      }
      layers.insert(module.module.substr(0, end));
    }
    result.facts = {{"base_model", config.base_model},
                    {"r", std::to_string(config.r)},
                    {"alpha", message(config.alpha)},
                    {"dropout", message(config.dropout)},
                    {"scale", message(config.scale(), config.rslora ? " (rslora)" : "")},
                    {"target_modules", joined(config.target_modules)},
                    {"modules", std::to_string(adapter.modules.size())},
                    {"layers", std::to_string(layers.size())},
                    {"usable", "yes"}};
  } catch (const ConfigError& error) {
    result.facts = {{"usable", message("no: ", error.what())}};
  }
  return result;
}

Inspection inspect_file(const fs::path& path) {
  Inspection result;
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto format = file.metadata().find("format");
  const bool tokens = format != file.metadata().end() && format->second == "rowshard.tokens";
  result.kind = tokens ? "tokens" : "tensors";
  for (const auto& [key, value] : file.metadata())
    result.facts.emplace_back(key, value);
  if (tokens && file.contains("input_ids")) {
    result.facts.emplace_back("tokens", std::to_string(file.at("input_ids").elements()));
  }
  Counter counter;
  for (const auto& [name, info] : file.tensors())
    counter.add(info);
  counter.finish(result);
  if (tokens)
    result.parameters = 0;
  return result;
}

}  // namespace

std::string Inspection::text() const {
  std::string out;
  char line[160];
  size_t width = 12;
  for (const auto& [key, value] : facts)
    width = std::max(width, key.size());
  const auto fact = [&](const std::string& key, const std::string& value) {
    out += key + std::string(width + 2 - key.size(), ' ') + value + "\n";
  };
  fact("kind", kind);
  for (const auto& [key, value] : facts)
    fact(key, value);
  if (parameters > 0)
    fact("parameters", std::to_string(parameters));
  out += "\n";
  std::snprintf(line, sizeof line, "%-10s %8s %16s %12s\n", "dtype", "tensors", "elements", "size");
  out += line;
  for (const Group& group : groups) {
    std::snprintf(line, sizeof line, "%-10s %8lld %16lld %12s\n", group.dtype.c_str(),
                  static_cast<long long>(group.tensors), static_cast<long long>(group.elements),
                  size_text(group.bytes).c_str());
    out += line;
  }
  return out;
}

std::string Inspection::json() const {
  ordered_json object;
  object["kind"] = kind;
  for (const auto& [key, value] : facts)
    object["facts"][key] = value;
  object["parameters"] = parameters;
  object["tensors"] = ordered_json::array();
  for (const Group& group : groups) {
    object["tensors"].push_back({{"dtype", group.dtype},
                                 {"tensors", group.tensors},
                                 {"elements", group.elements},
                                 {"bytes", group.bytes}});
  }
  // Metadata of other people's files may be no UTF-8.
  return object.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

Inspection inspect(const fs::path& path) {
  if (fs::is_regular_file(path))
    return inspect_file(path);
  ROWSHARD_CHECK(fs::is_directory(path), ConfigError, path.string(), ": no such directory");
  if (fs::exists(path / "adapter_config.json") && !fs::exists(path / "config.json")) {
    return inspect_adapter(path);
  }
  ROWSHARD_CHECK(fs::exists(path / "config.json"), ConfigError, path.string(),
                 ": neither config.json nor adapter_config.json in it; a model or an adapter "
                 "directory is needed");
  return inspect_model(path);
}

}  // namespace rowshard
