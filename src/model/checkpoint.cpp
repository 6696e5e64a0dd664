#include "model/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/log.h"
#include "fp8/formats.h"

namespace rowshard {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kScaleSuffix = "_scale_inv";

bool ends_with(const std::string& text, const std::string& tail) {
  return text.size() >= tail.size() &&
         text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

std::string dims_text(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i)
    text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

/// dims[0] and the product of the rest.
std::pair<int64_t, int64_t> rows_and_cols(const TensorInfo& info) {
  if (info.dims.empty())
    return {1, 1};
  int64_t cols = 1;
  for (size_t i = 1; i < info.dims.size(); ++i)
    cols *= info.dims[i];
  return {info.dims[0], cols};
}

template <typename T>
std::vector<float> widen_all(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    T element;
    std::memcpy(&element, bytes.data() + i * sizeof(T), sizeof(T));
    values[i] = static_cast<float>(element);
  }
  return values;
}

/// An entry matches as a run of whole dotted parts: "mlp.gate" lists "model.layers.3.mlp.gate", and
/// not "model.layers.3.mlp.gate_proj".
bool is_listed(const std::string& module, const std::vector<std::string>& list) {
  const std::string dotted = "." + module + ".";
  return std::any_of(list.begin(), list.end(), [&](const std::string& entry) {
    return dotted.find("." + entry + ".") != std::string::npos;
  });
}

bool is_plain(const TensorInfo& info) {
  return info.tag == "F32" || info.tag == "F16" || info.tag == "BF16";
}

/// Every e4m3 weight has its scale of the right shape, and every scale its e4m3 weight.
void check_fp8_pairs(const TensorFiles& tensors, const ModelConfig& config) {
  for (const std::string& name : tensors.names()) {
    const TensorInfo& info = tensors.at(name);
    const std::string where = message(tensors.file_of(name).string(), ": ");
    if (ends_with(name, kScaleSuffix)) {
      const std::string weight = name.substr(0, name.size() - std::strlen(kScaleSuffix));
      ROWSHARD_CHECK(tensors.contains(weight), ConfigError, where, "scale ", name,
                     " has no weight ", weight, "; a shard is missing or the export is broken");
      ROWSHARD_CHECK(tensors.at(weight).tag == "F8_E4M3", ConfigError, where, "scale ", name,
                     " belongs to weight ", weight, " of ", tensors.at(weight).describe(),
                     ", which is not FP8; the export is broken");
      continue;
    }
    if (info.tag != "F8_E4M3")
      continue;
    ROWSHARD_CHECK(config.fp8.has_value(), ConfigError, where, "tensor ", name, " is ",
                   info.describe(),
                   ", but config.json has no quantization_config with the block "
                   "size; take config.json from the same repository as the weights");
    const std::string scale = scale_name(name);
    ROWSHARD_CHECK(tensors.contains(scale), ConfigError, where, "FP8 weight ", name,
                   " has no scale ", scale,
                   "; its codes mean nothing without it, download the checkpoint again");
    ROWSHARD_CHECK(info.dims.size() == 2, ConfigError, where, "FP8 weight ", name, " is ",
                   info.describe(), ", and only matrices can have block scales");
    const TensorInfo& found = tensors.at(scale);
    const std::vector<int64_t> wanted{ceil_div(info.dims[0], config.fp8->block_rows),
                                      ceil_div(info.dims[1], config.fp8->block_cols)};
    const bool transposed =
        found.dims.size() == 2 && found.dims[0] == wanted[1] && found.dims[1] == wanted[0];
    ROWSHARD_CHECK(found.dims == wanted, ConfigError, tensors.file_of(scale).string(), ": scale ",
                   scale, " is ", found.describe(), ", and ", dims_text(wanted),
                   " is needed for a weight of ", info.describe(),
                   transposed ? "; it looks transposed, which cannot be told apart for square "
                                "weights, so the file must be exported again"
                              : "; the export is broken or its block size is another");
    ROWSHARD_CHECK(found.tag == "F32" || found.tag == "BF16" || found.tag == "F8_E8M0", ConfigError,
                   tensors.file_of(scale).string(), ": scale ", scale, " is ", found.describe(),
                   ", and F32, BF16 or F8_E8M0 is needed");
    const std::string module = name.substr(0, name.rfind('.'));
    if (is_listed(module, config.fp8->not_converted)) {
      log(message(where, "weight ", name, " is FP8 although config.json lists ", module,
                  " as not converted; taken as FP8"));
    }
  }
}

/// Every tensor of the model is there, with its shape and a dtype we read.
void check_complete(const TensorFiles& tensors, const ModelConfig& config) {
  std::set<std::string> known;
  const auto require = [&](const std::string& name, const std::vector<int64_t>& dims, bool linear) {
    known.insert(name);
    const TensorInfo& info = tensors.require(name, dims);
    if (linear && info.tag == "F8_E4M3") {
      known.insert(scale_name(name));
      return;
    }
    ROWSHARD_CHECK(is_plain(info), ConfigError, tensors.file_of(name).string(), ": tensor ", name,
                   " is ", info.describe(), ", and ", linear ? "F8_E4M3, " : "",
                   "BF16, F16 or F32 is needed");
  };
  require("model.embed_tokens.weight", {config.vocab_size, config.hidden_size}, false);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string prefix = layer_prefix(layer);
    require(prefix + "input_layernorm.weight", {config.hidden_size}, false);
    require(prefix + "post_attention_layernorm.weight", {config.hidden_size}, false);
    if (config.qk_norm) {
      require(prefix + "self_attn.q_norm.weight", {config.head_dim}, false);
      require(prefix + "self_attn.k_norm.weight", {config.head_dim}, false);
    }
    for (const LinearModule& linear : config.linears()) {
      require(prefix + linear.name + ".weight", {linear.n, linear.k}, true);
      const std::string bias = prefix + linear.name + ".bias";
      if (linear.bias)
        require(bias, {linear.n}, false);
      // Silently leaving out a bias would train another model.
      ROWSHARD_CHECK(linear.bias || !tensors.contains(bias), ConfigError,
                     tensors.file_of(prefix + linear.name + ".weight").string(), ": tensor ", bias,
                     " exists, but config.json says that this layer has no bias");
    }
  }
  require("model.norm.weight", {config.hidden_size}, false);
  if (!config.tie_word_embeddings) {
    require("lm_head.weight", {config.vocab_size, config.hidden_size}, false);
  }
  int64_t unused = 0;
  std::string example;
  for (const std::string& name : tensors.names()) {
    if (known.count(name))
      continue;
    ++unused;
    if (example.empty())
      example = name;
  }
  if (unused > 0) {
    log(message(tensors.directory().string(), ": ", unused, " tensors are not part of a ",
                to_string(config.family), " model with ", config.layers,
                " layers and are not used, e.g. ", example));
  }
}

}  // namespace

std::string scale_name(const std::string& weight) {
  return weight + kScaleSuffix;
}

TensorFiles TensorFiles::open(const fs::path& directory) {
  TensorFiles result;
  result.directory_ = directory;
  std::error_code ignored;
  ROWSHARD_CHECK(fs::is_directory(directory, ignored), ConfigError, directory.string(),
                 ": no such directory");
  const fs::path index_path = directory / "model.safetensors.index.json";
  if (!fs::exists(index_path)) {
    const fs::path single = directory / "model.safetensors";
    ROWSHARD_CHECK(
        fs::exists(single), ConfigError, directory.string(),
        ": neither model.safetensors nor model.safetensors.index.json in it",
        fs::exists(directory / "pytorch_model.bin") ||
                fs::exists(directory / "pytorch_model.bin.index.json")
            ? "; pytorch_model.bin is not read, save the model with safe_serialization=True"
        : fs::exists(directory / "adapter_config.json")
            ? "; this is an adapter, give the base model as the model"
            : "; a Hugging Face model directory is needed");
    result.files_.push_back(SafetensorsFile::open(single));
    for (const auto& [name, info] : result.files_[0].tensors())
      result.where_[name] = 0;
    return result;
  }

  const json index = read_json_file(index_path);
  const std::string where = index_path.string();
  ROWSHARD_CHECK(index.is_object() && index.contains("weight_map") &&
                     index["weight_map"].is_object() && !index["weight_map"].empty(),
                 ConfigError, where, ": no weight_map in it");
  std::map<std::string, size_t> files;  // shard -> index into files_
  std::string missing;
  for (const auto& [name, shard] : index["weight_map"].items()) {
    ROWSHARD_CHECK(shard.is_string(), ConfigError, where, ": weight_map of ", name,
                   " is no file name");
    const std::string file = shard.get<std::string>();
    ROWSHARD_CHECK(!file.empty() && fs::path(file).filename() == file && file != "..", ConfigError,
                   where, ": weight_map of ", name, " is ", file,
                   ", and a file in the same directory is needed");
    files.emplace(file, 0);
  }
  for (const auto& [file, unused] : files) {
    if (!fs::exists(directory / file))
      missing += (missing.empty() ? "" : ", ") + file;
  }
  ROWSHARD_CHECK(missing.empty(), ConfigError, directory.string(), ": missing shards: ", missing,
                 "; the download is incomplete");
  for (auto& [file, position] : files) {
    position = result.files_.size();
    result.files_.push_back(SafetensorsFile::open(directory / file));
  }
  for (const auto& [name, shard] : index["weight_map"].items()) {
    const std::string file = shard.get<std::string>();
    const size_t position = files.at(file);
    ROWSHARD_CHECK(result.files_[position].contains(name), ConfigError, where, ": tensor ", name,
                   " is said to be in ", file,
                   ", which does not have it; index and shards are of different exports");
    result.where_[name] = position;
  }
  // A tensor that the index does not list would be ignored by other readers too, but two files with
  // the same tensor are two exports mixed up.
  for (size_t i = 0; i < result.files_.size(); ++i) {
    for (const auto& [name, info] : result.files_[i].tensors()) {
      ROWSHARD_CHECK(result.where_.count(name) != 0 && result.where_[name] == i, ConfigError,
                     result.files_[i].path().string(), ": tensor ", name,
                     " is not listed for this file in ", where,
                     "; index and shards are of different exports");
    }
  }
  return result;
}

std::vector<std::string> TensorFiles::names() const {
  std::vector<std::string> result;
  for (const auto& [name, position] : where_)
    result.push_back(name);
  return result;
}

const SafetensorsFile& TensorFiles::holder(const std::string& name) const {
  const auto found = where_.find(name);
  ROWSHARD_CHECK(found != where_.end(), ConfigError, directory_.string(), ": no tensor ", name,
                 " among its ", where_.size(),
                 "; config.json and weights are of different models, or a file is incomplete");
  return files_[found->second];
}

const TensorInfo& TensorFiles::at(const std::string& name) const {
  return holder(name).at(name);
}

fs::path TensorFiles::file_of(const std::string& name) const {
  return holder(name).path();
}

const TensorInfo& TensorFiles::require(const std::string& name,
                                       const std::vector<int64_t>& dims) const {
  const TensorInfo& info = at(name);
  ROWSHARD_CHECK(info.dims == dims, ConfigError, file_of(name).string(), ": tensor ", name, " is ",
                 info.describe(), ", and config.json asks for ", dims_text(dims));
  return info;
}

void TensorFiles::read(const std::string& name, int64_t byte_begin, int64_t byte_count,
                       void* destination) const {
  holder(name).read(name, byte_begin, byte_count, destination);
}

void TensorFiles::read_rows(const std::string& name, int64_t row_begin, int64_t rows,
                            void* destination) const {
  const TensorInfo& info = at(name);
  const int64_t all = rows_and_cols(info).first;
  ROWSHARD_CHECK(row_begin >= 0 && rows >= 0 && row_begin + rows <= all, LogicError, "rows ",
                 row_begin, " to ", row_begin + rows, " of ", name, ", ", info.describe());
  const int64_t row_bytes = all == 0 ? 0 : info.bytes / all;
  read(name, row_begin * row_bytes, rows * row_bytes, destination);
}

void TensorFiles::read_block(const std::string& name, int64_t row_begin, int64_t rows,
                             int64_t col_begin, int64_t cols, void* destination) const {
  const TensorInfo& info = at(name);
  const auto [all_rows, all_cols] = rows_and_cols(info);
  ROWSHARD_CHECK(row_begin >= 0 && rows >= 0 && row_begin + rows <= all_rows && col_begin >= 0 &&
                     cols >= 0 && col_begin + cols <= all_cols,
                 LogicError, "rows ", row_begin, " to ", row_begin + rows, " and columns ",
                 col_begin, " to ", col_begin + cols, " of ", name, ", ", info.describe());
  if (cols == all_cols)
    return read_rows(name, row_begin, rows, destination);
  if (rows == 0 || cols == 0)
    return;
  const int64_t element = info.bytes / (all_rows * all_cols);
  auto* to = static_cast<std::byte*>(destination);
  for (int64_t row = row_begin; row < row_begin + rows; ++row) {
    read(name, (row * all_cols + col_begin) * element, cols * element, to);
    to += cols * element;
  }
}

Checkpoint Checkpoint::open(const fs::path& directory) {
  Checkpoint result;
  result.config_ = ModelConfig::load(directory);
  result.tensors_ = TensorFiles::open(directory);
  check_fp8_pairs(result.tensors_, result.config_);
  check_complete(result.tensors_, result.config_);
  return result;
}

bool Checkpoint::is_fp8(const std::string& weight) const {
  return tensors_.at(weight).tag == "F8_E4M3";
}

bool Checkpoint::has_fp8() const {
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    for (const LinearModule& linear : config_.linears()) {
      if (is_fp8(layer_prefix(layer) + linear.name + ".weight"))
        return true;
    }
  }
  return false;
}

std::vector<float> Checkpoint::read_f32(const std::string& name) const {
  return read_rows_f32(name, 0, rows_and_cols(tensors_.at(name)).first);
}

std::vector<float> Checkpoint::read_rows_f32(const std::string& name, int64_t row_begin,
                                             int64_t rows) const {
  return read_block_f32(name, row_begin, rows, 0, rows_and_cols(tensors_.at(name)).second);
}

std::vector<float> Checkpoint::read_block_f32(const std::string& name, int64_t row_begin,
                                              int64_t rows, int64_t col_begin, int64_t cols) const {
  const TensorInfo& info = tensors_.at(name);
  const auto [all_rows, all_cols] = rows_and_cols(info);
  ROWSHARD_CHECK(is_plain(info), ConfigError, tensors_.file_of(name).string(), ": tensor ", name,
                 " is ", info.describe(), ", and BF16, F16 or F32 is needed");
  const int64_t all = all_rows * all_cols;
  std::vector<std::byte> bytes(all == 0 ? 0 : rows * cols * (info.bytes / all));
  tensors_.read_block(name, row_begin, rows, col_begin, cols, bytes.data());
  if (info.tag == "F32")
    return widen_all<float>(bytes);
  return info.tag == "F16" ? widen_all<f16>(bytes) : widen_all<bf16>(bytes);
}

std::vector<float> Checkpoint::read_scales(const std::string& weight) const {
  ROWSHARD_CHECK(is_fp8(weight), LogicError, "scales of ", weight, ", which is ",
                 tensors_.at(weight).describe());
  const std::string name = scale_name(weight);
  const TensorInfo& info = tensors_.at(name);
  std::vector<std::byte> bytes(info.bytes);
  tensors_.read(name, 0, info.bytes, bytes.data());
  std::vector<float> scales;
  if (info.tag == "F8_E8M0") {
    for (std::byte code : bytes)
      scales.push_back(decode_e8m0(static_cast<uint8_t>(code)));
  } else {
    scales = info.tag == "F32" ? widen_all<float>(bytes) : widen_all<bf16>(bytes);
  }
  for (size_t i = 0; i < scales.size(); ++i) {
    ROWSHARD_CHECK(std::isfinite(scales[i]) && scales[i] >= 0, ConfigError,
                   tensors_.file_of(name).string(), ": scale ", name, " has the value ", scales[i],
                   " at block [", i / info.dims[1], ", ", i % info.dims[1],
                   "]; the file is damaged or the export is broken");
  }
  return scales;
}

std::vector<float> Checkpoint::read_rows_dequantized(const std::string& weight, int64_t row_begin,
                                                     int64_t rows) const {
  if (!is_fp8(weight))
    return read_rows_f32(weight, row_begin, rows);
  const int64_t cols = tensors_.at(weight).dims[1];
  std::vector<uint8_t> codes(rows * cols);
  tensors_.read_rows(weight, row_begin, rows, codes.data());
  const std::vector<float> scales = read_scales(weight);
  const int64_t block_rows = config_.fp8->block_rows, block_cols = config_.fp8->block_cols;
  const int64_t blocks = ceil_div(cols, block_cols);
  std::vector<float> values(codes.size());
  for (int64_t row = 0; row < rows; ++row) {
    const float* scale = &scales[(row_begin + row) / block_rows * blocks];
    for (int64_t col = 0; col < cols; ++col) {
      values[row * cols + col] = decode_e4m3(codes[row * cols + col]) * scale[col / block_cols];
    }
  }
  return values;
}

}  // namespace rowshard
