#include "model/checkpoint_writer.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"

namespace rowshard {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

std::string shard_name(size_t index, size_t count) {
  if (count == 1)
    return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

/// Weights in any format, and what describes them; everything else belongs to the model.
bool is_weight_file(const fs::path& path) {
  static const std::set<std::string> extensions{".safetensors", ".bin", ".pt",   ".pth",
                                                ".gguf",        ".h5",  ".onnx", ".msgpack"};
  const std::string name = path.filename().string();
  return extensions.count(path.extension().string()) != 0 || name == "config.json" ||
         name.ends_with(".index.json") || name.front() == '.';
}

}  // namespace

CheckpointWriter::CheckpointWriter(const fs::path& destination,
                                   const std::vector<std::vector<TensorSpec>>& groups,
                                   int64_t max_shard_bytes)
    : output_(destination) {
  ROWSHARD_CHECK(max_shard_bytes > 0, ConfigError, "the largest shard is ", max_shard_bytes,
                 " bytes, and must be positive");
  int64_t in_shard = 0;
  for (const auto& group : groups) {
    int64_t group_bytes = 0;
    for (const TensorSpec& spec : group)
      group_bytes += spec.bytes();
    if (shards_.empty() || (in_shard > 0 && in_shard + group_bytes > max_shard_bytes)) {
      shards_.emplace_back();
      in_shard = 0;
    }
    for (const TensorSpec& spec : group) {
      where_[spec.name] = shards_.size() - 1;
      shards_.back().specs.push_back(spec);
    }
    in_shard += group_bytes;
    bytes_ += group_bytes;
  }
  ROWSHARD_CHECK(!shards_.empty(), LogicError, "a checkpoint without tensors");
  for (size_t i = 0; i < shards_.size(); ++i)
    shards_[i].name = shard_name(i, shards_.size());
}

void CheckpointWriter::write(const std::string& name, const void* data, int64_t bytes) {
  const auto found = where_.find(name);
  ROWSHARD_CHECK(found != where_.end(), LogicError, "tensor ", name, " was not declared");
  if (writer_ == nullptr || found->second != current_) {
    ROWSHARD_CHECK(found->second == (writer_ == nullptr ? 0 : current_ + 1), LogicError, "tensor ",
                   name, " of ", shards_[found->second].name, " written out of order");
    if (writer_ != nullptr)
      writer_->finish();
    current_ = found->second;
    writer_ = std::make_unique<SafetensorsWriter>(output_.temporary() / shards_[current_].name,
                                                  shards_[current_].specs);
  }
  writer_->write(name, data, bytes);
}

void CheckpointWriter::finish(const fs::path& source, const ordered_json& config) {
  ROWSHARD_CHECK(writer_ != nullptr && current_ + 1 == shards_.size(), LogicError,
                 "a checkpoint finished before its last file was written");
  writer_->finish();
  if (shards_.size() > 1) {
    ordered_json index;
    index["metadata"]["total_size"] = bytes_;
    for (const auto& [name, shard] : where_)
      index["weight_map"][name] = shards_[shard].name;
    write_text_file(output_.temporary() / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  write_text_file(output_.temporary() / "config.json", config.dump(2) + "\n");
  for (const auto& entry : fs::directory_iterator(source)) {
    if (!entry.is_regular_file() || is_weight_file(entry.path()))
      continue;
    const fs::path target = output_.temporary() / entry.path().filename();
    std::error_code error;
    fs::copy_file(entry.path(), target, error);
    ROWSHARD_CHECK(!error, ConfigError, "cannot copy ", entry.path().string(), " to ",
                   target.string(), ": ", error.message());
  }
  output_.finish();
}

void copy_tensor(const TensorFiles& source, const std::string& name, CheckpointWriter& writer) {
  constexpr int64_t kPiece = int64_t{16} << 20;
  const int64_t bytes = source.at(name).bytes;
  std::vector<std::byte> piece(std::min(bytes, kPiece));
  for (int64_t begin = 0; begin < bytes; begin += kPiece) {
    const int64_t count = std::min(kPiece, bytes - begin);
    source.read(name, begin, count, piece.data());
    writer.write(name, piece.data(), count);
  }
}

ordered_json read_config_for_edit(const fs::path& directory) {
  const fs::path path = directory / "config.json";
  try {
    return ordered_json::parse(read_text_file(path));
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(message(path.string(), ": no valid JSON: ", error.what()));
  }
}

}  // namespace rowshard
