// Writes a Hugging Face model directory tensor by tensor: one model.safetensors, or shards of
// bounded size with their index, the edited config.json, and the small files of the model it came
// from. The directory appears as a whole at `finish` (model/files.h).
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/files.h"

namespace rowshard {

class CheckpointWriter {
 public:
  /// groups: the tensors of one group (a weight and its scale) stay in one file. A file holds
  /// groups in their order, as many as fit max_shard_bytes, and at least one.
  CheckpointWriter(const std::filesystem::path& destination,
                   const std::vector<std::vector<TensorSpec>>& groups, int64_t max_shard_bytes);

  /// The next bytes of a tensor. All tensors of a file must be complete before the first of the
  /// next file, so groups are written in their order.
  void write(const std::string& name, const void* data, int64_t bytes);
  /// Copies the files of `source` that are not weights, not their index, and not config.json;
  /// writes `config` as config.json and the index; renames the directory into place.
  void finish(const std::filesystem::path& source, const nlohmann::ordered_json& config);

  int files() const { return static_cast<int>(shards_.size()); }
  int64_t bytes() const { return bytes_; }  // of all tensors

 private:
  struct Shard {
    std::string name;
    std::vector<TensorSpec> specs;
  };

  AtomicDirectory output_;
  std::vector<Shard> shards_;
  std::map<std::string, size_t> where_;  // tensor -> shard
  std::unique_ptr<SafetensorsWriter> writer_;
  size_t current_ = 0;
  int64_t bytes_ = 0;
};

/// Copies a tensor's bytes.
void copy_tensor(const TensorFiles& source, const std::string& name, CheckpointWriter& writer);

/// config.json of a model directory, with the order of its keys kept.
nlohmann::ordered_json read_config_for_edit(const std::filesystem::path& directory);

}  // namespace rowshard
