#include "model/peft_adapter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "model/hf_config.h"
#include "model/safetensors.h"

namespace rowshard {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kConfigName = "adapter_config.json";
constexpr const char* kWeightsName = "adapter_model.safetensors";
constexpr const char* kPrefix = "base_model.model.";
constexpr const char* kTailA = ".lora_A.weight";
constexpr const char* kTailB = ".lora_B.weight";
// The release of peft whose key set the written configuration has.
constexpr const char* kPeftVersion = "0.18.0";

bool ends_with(const std::string& text, const std::string& tail) {
  return text.size() >= tail.size() &&
         text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

/// 32 rather than 32.0, as PEFT writes integral alphas.
json number(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e15)
    return static_cast<int64_t>(value);
  return value;
}

json config_json(const AdapterConfig& config) {
  const std::set<std::string> targets(config.target_modules.begin(), config.target_modules.end());
  // nlohmann::json keeps keys sorted, as PEFT does.
  return {{"alpha_pattern", json::object()},
          {"auto_mapping", nullptr},
          {"base_model_name_or_path", config.base_model},
          {"bias", "none"},
          {"exclude_modules", nullptr},
          {"fan_in_fan_out", false},
          {"inference_mode", true},
          {"init_lora_weights", true},
          {"layers_pattern", nullptr},
          {"layers_to_transform", nullptr},
          {"loftq_config", json::object()},
          {"lora_alpha", number(config.alpha)},
          {"lora_bias", false},
          {"lora_dropout", number(config.dropout)},
          {"megatron_config", nullptr},
          {"megatron_core", "megatron.core"},
          {"modules_to_save", nullptr},
          {"peft_type", "LORA"},
          {"peft_version", kPeftVersion},
          {"r", config.r},
          {"rank_pattern", json::object()},
          {"revision", nullptr},
          {"target_modules", targets},
          {"target_parameters", nullptr},
          {"task_type", "CAUSAL_LM"},
          {"trainable_token_indices", nullptr},
          {"use_dora", false},
          {"use_rslora", config.rslora}};
}

std::string model_card(const AdapterConfig& config) {
  int served_rank = 8;  // vLLM takes certain ranks only, powers of two among them
  while (served_rank < config.r)
    served_rank *= 2;
  // Front matter is YAML: JSON's quoted strings are valid in it.
  return message("---\nbase_model: ", json(config.base_model).dump(),
                 "\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n- rowshard\n"
                 "---\n\n# LoRA adapter\n\nTrained with rowshard on a frozen base. Rank ",
                 config.r, ", alpha ", config.alpha,
                 ".\n\n```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
                 "model = AutoPeftModelForCausalLM.from_pretrained(\"<this directory>\")\n```\n\n"
                 "With vLLM: `--enable-lora --max-lora-rank ",
                 served_rank, " --lora-modules name=<this directory>`.\n");
}

/// Throws unless key is absent, null, false, or an empty list or object.
void refuse_unless_empty(const json& config, const char* key, const std::string& where,
                         const char* why) {
  if (!config.contains(key))
    return;
  const json& value = config[key];
  const bool is_false = value.is_boolean() && !value.get<bool>();
  const bool is_empty = (value.is_array() || value.is_object()) && value.empty();
  ROWSHARD_CHECK(value.is_null() || is_false || is_empty, ConfigError, where, ": ", key, " is ",
                 value.dump(), ", and ", why);
}

AdapterConfig parse_config(const json& config, const std::string& where) {
  ROWSHARD_CHECK(config.is_object(), ConfigError, where, ": no JSON object");
  const auto text = [&](const char* key) {
    return config.contains(key) && config[key].is_string() ? config[key].get<std::string>()
                                                           : std::string();
  };
  ROWSHARD_CHECK(text("peft_type") == "LORA", ConfigError, where, ": peft_type is ",
                 config.contains("peft_type") ? config["peft_type"].dump() : "missing",
                 ", and only LORA is supported");
  refuse_unless_empty(config, "use_dora", where, "DoRA is not supported");
  refuse_unless_empty(config, "modules_to_save", where,
                      "whole trained modules beside the adapter are not supported");
  refuse_unless_empty(config, "rank_pattern", where, "only one rank for all modules is supported");
  refuse_unless_empty(config, "alpha_pattern", where,
                      "only one alpha for all modules is supported");
  refuse_unless_empty(config, "lora_bias", where, "a bias on lora_B is not supported");
  refuse_unless_empty(config, "use_qalora", where, "QALoRA is not supported");
  refuse_unless_empty(config, "fan_in_fan_out", where, "transposed weights are not supported");
  refuse_unless_empty(config, "layer_replication", where, "replicated layers are not supported");
  refuse_unless_empty(config, "target_parameters", where,
                      "adapters of bare parameters are not supported");
  refuse_unless_empty(config, "trainable_token_indices", where,
                      "trained token embeddings are not supported");
  ROWSHARD_CHECK(text("bias").empty() || text("bias") == "none", ConfigError, where, ": bias is ",
                 config["bias"].dump(), ", and only none is supported");

  AdapterConfig result;
  ROWSHARD_CHECK(config.contains("r") && config["r"].is_number_integer() &&
                     config["r"].get<int64_t>() > 0 && config["r"].get<int64_t>() <= 65536,
                 ConfigError, where, ": r is ",
                 config.contains("r") ? config["r"].dump() : "missing",
                 ", and a positive integer is needed");
  result.r = config["r"].get<int>();
  ROWSHARD_CHECK(config.contains("lora_alpha") && config["lora_alpha"].is_number(), ConfigError,
                 where, ": lora_alpha is ",
                 config.contains("lora_alpha") ? config["lora_alpha"].dump() : "missing",
                 ", and a number is needed");
  result.alpha = config["lora_alpha"].get<double>();
  if (config.contains("lora_dropout") && config["lora_dropout"].is_number()) {
    result.dropout = config["lora_dropout"].get<double>();
  }
  result.base_model = text("base_model_name_or_path");
  if (config.contains("use_rslora") && config["use_rslora"].is_boolean()) {
    result.rslora = config["use_rslora"].get<bool>();
  }
  if (config.contains("target_modules") && config["target_modules"].is_array()) {
    for (const json& target : config["target_modules"]) {
      ROWSHARD_CHECK(target.is_string(), ConfigError, where,
                     ": target_modules is no list of names");
      result.target_modules.push_back(target.get<std::string>());
    }
    std::sort(result.target_modules.begin(), result.target_modules.end());
  }
  return result;
}

std::vector<float> read_factor(const SafetensorsFile& file, const TensorInfo& info) {
  const std::string& name = info.name;
  if (info.tag == "F32")
    return file.read_all<float>(name);
  ROWSHARD_CHECK(info.tag == "F16" || info.tag == "BF16", ConfigError, file.path().string(),
                 ": tensor ", name, " is ", info.describe(), ", and F32, F16 or BF16 is needed");
  std::vector<float> values(info.elements());
  if (info.tag == "F16") {
    const auto halves = file.read_all<f16>(name);
    std::transform(halves.begin(), halves.end(), values.begin(),
                   [](f16 value) { return static_cast<float>(value); });
  } else {
    const auto halves = file.read_all<bf16>(name);
    std::transform(halves.begin(), halves.end(), values.begin(),
                   [](bf16 value) { return static_cast<float>(value); });
  }
  return values;
}

void check_module_name(const std::string& module) {
  // The wrong prefix is accepted by some readers, which then serve the base model unchanged.
  ROWSHARD_CHECK(!module.empty() && module.rfind(kPrefix, 0) != 0 &&
                     module.find("_orig_mod") == std::string::npos && module.back() != '.',
                 LogicError, "adapter module ", module,
                 ": the plain module path of the base model is needed");
}

}  // namespace

double AdapterConfig::scale() const {
  return rslora ? alpha / std::sqrt(r) : alpha / r;
}

const AdapterModule* Adapter::find(const std::string& module) const {
  const auto found =
      std::lower_bound(modules.begin(), modules.end(), module,
                       [](const AdapterModule& a, const std::string& b) { return a.module < b; });
  return found != modules.end() && found->module == module ? &*found : nullptr;
}

void write_adapter(const fs::path& directory, const AdapterConfig& config,
                   const std::vector<AdapterTensor>& tensors, DType dtype) {
  ROWSHARD_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, ConfigError,
                 "an adapter is written as f32 or bf16, not ", to_string(dtype));
  ROWSHARD_CHECK(!tensors.empty(), LogicError, "an adapter without modules");
  std::vector<TensorSpec> specs;
  for (const AdapterTensor& tensor : tensors) {
    check_module_name(tensor.module);
    for (const ConstView& view : {tensor.a, tensor.b}) {
      ROWSHARD_CHECK(view.dtype == DType::kF32 && view.device.is_host() && view.shape.rank() == 2,
                     ShapeError, "adapter of ", tensor.module, ": ", describe(view),
                     ", and an f32 matrix on the host is needed");
    }
    ROWSHARD_CHECK(tensor.a.dim(0) == config.r && tensor.b.dim(1) == config.r, ShapeError,
                   "adapter of ", tensor.module, ": A ", tensor.a.shape, " and B ", tensor.b.shape,
                   " do not have rank ", config.r);
    // Readers take only modules whose name ends in a target.
    ROWSHARD_CHECK(std::any_of(config.target_modules.begin(), config.target_modules.end(),
                               [&](const std::string& target) {
                                 return tensor.module == target ||
                                        ends_with(tensor.module, "." + target);
                               }),
                   LogicError, "adapter of ", tensor.module, ": no target module names it");
    const std::string base = kPrefix + tensor.module;
    specs.push_back({base + kTailA, safetensors_tag(dtype), {tensor.a.dim(0), tensor.a.dim(1)}});
    specs.push_back({base + kTailB, safetensors_tag(dtype), {tensor.b.dim(0), tensor.b.dim(1)}});
  }

  AtomicDirectory output(directory, true);
  {
    SafetensorsWriter writer(output.temporary() / kWeightsName, specs);
    for (const AdapterTensor& tensor : tensors) {
      for (const auto& [view, tail] : {std::pair(tensor.a, kTailA), std::pair(tensor.b, kTailB)}) {
        const std::string name = kPrefix + tensor.module + tail;
        const auto* values = view.as<float>();
        for (int64_t i = 0; i < view.elements(); ++i) {
          ROWSHARD_CHECK(std::isfinite(values[i]), ConfigError, "adapter tensor ", name,
                         " has the value ", values[i], " at element ", i,
                         "; training diverged, use a lower learning rate");
        }
        if (dtype == DType::kF32) {
          writer.write(name, values, view.bytes());
          continue;
        }
        std::vector<bf16> rounded(view.elements());
        std::transform(values, values + view.elements(), rounded.begin(),
                       [](float value) { return bf16(value); });
        writer.write(name, rounded.data(), static_cast<int64_t>(rounded.size() * sizeof(bf16)));
      }
    }
    writer.finish();
  }
  try {
    write_text_file(output.temporary() / kConfigName, config_json(config).dump(2) + "\n");
    write_text_file(output.temporary() / "README.md", model_card(config));
  } catch (const json::exception& error) {
    throw ConfigError(
        message(directory.string(), ": the adapter's configuration is no UTF-8: ", error.what()));
  }
  output.finish();
}

Adapter read_adapter(const fs::path& directory) {
  const fs::path config_path = directory / kConfigName;
  ROWSHARD_CHECK(fs::exists(config_path), ConfigError, directory.string(), ": no ", kConfigName,
                 " in it; a PEFT adapter directory is needed");
  Adapter result;
  result.config = parse_config(read_json_file(config_path), config_path.string());
  const fs::path path = directory / kWeightsName;
  ROWSHARD_CHECK(fs::exists(path), ConfigError, directory.string(), ": no ", kWeightsName, " in it",
                 fs::exists(directory / "adapter_model.bin")
                     ? "; adapter_model.bin is not read, save with safe_serialization=True"
                     : "; the adapter is incomplete");
  const SafetensorsFile file = SafetensorsFile::open(path);

  const std::string where = path.string();
  std::map<std::string, std::pair<const TensorInfo*, const TensorInfo*>> pairs;
  for (const auto& [name, info] : file.tensors()) {
    const bool is_a = ends_with(name, kTailA), is_b = ends_with(name, kTailB);
    const std::string tail = is_a ? kTailA : kTailB;
    ROWSHARD_CHECK(name.rfind(kPrefix, 0) == 0 && (is_a || is_b), ConfigError, where, ": tensor ",
                   name, " is no ", kPrefix,
                   "<module>.lora_A.weight or lora_B.weight; only LoRA "
                   "of linear layers is supported");
    const size_t prefix = std::strlen(kPrefix);
    auto& pair = pairs[name.substr(prefix, name.size() - prefix - tail.size())];
    (is_a ? pair.first : pair.second) = &info;
  }
  ROWSHARD_CHECK(!pairs.empty(), ConfigError, where, ": no tensors in it");
  std::set<std::string> targets;
  for (const auto& [module, pair] : pairs) {
    const auto& [a, b] = pair;
    ROWSHARD_CHECK(a != nullptr && b != nullptr, ConfigError, where, ": module ", module, " has ",
                   a ? "lora_A" : "lora_B", " alone; the file is incomplete");
    ROWSHARD_CHECK(a->dims.size() == 2 && b->dims.size() == 2 && a->dims[0] == result.config.r &&
                       b->dims[1] == result.config.r,
                   ConfigError, where, ": module ", module, " has A ", a->describe(), " and B ",
                   b->describe(), ", which do not have the rank r = ", result.config.r, " of ",
                   kConfigName);
    AdapterModule owned;
    owned.module = module;
    owned.in = a->dims[1];
    owned.out = b->dims[0];
    owned.a = read_factor(file, *a);
    owned.b = read_factor(file, *b);
    result.modules.push_back(std::move(owned));
    targets.insert(module.substr(module.rfind('.') + 1));
  }
  // A pattern instead of a list: the tensors say what it matched.
  if (result.config.target_modules.empty()) {
    result.config.target_modules.assign(targets.begin(), targets.end());
  }
  return result;
}

}  // namespace rowshard
