// A Hugging Face model directory as a set of named tensors.
//
// TensorFiles is one model.safetensors, or an index and its shards; Checkpoint adds config.json and
// the rules of native block FP8: every e4m3 weight X.weight [N, K] has a X.weight_scale_inv
// [ceil(N/128), ceil(K/128)] in f32, bf16 or e8m0, and the reverse; value = code x scale. A scale
// whose shape is transposed is refused: for square weights it could not be told apart. Everything
// is checked at open, on names and shapes alone; tensor bytes are read in ranges, later. Reads may
// come from several threads. All errors are ConfigErrors that name file, tensor and remedy.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/view.h"
#include "model/hf_config.h"
#include "model/safetensors.h"

namespace rowshard {

class TensorFiles {
 public:
  /// model.safetensors.index.json and the shards it lists, else model.safetensors.
  static TensorFiles open(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return where_.count(name) != 0; }
  const TensorInfo& at(const std::string& name) const;
  /// `at`, after a check of the shape.
  const TensorInfo& require(const std::string& name, const std::vector<int64_t>& dims) const;

  void read(const std::string& name, int64_t byte_begin, int64_t byte_count,
            void* destination) const;
  /// Rows of a tensor seen as [dims[0], product of the rest].
  void read_rows(const std::string& name, int64_t row_begin, int64_t rows, void* destination) const;
  /// The block [row_begin, +rows) x [col_begin, +cols) of a matrix, packed: [rows, cols].
  void read_block(const std::string& name, int64_t row_begin, int64_t rows, int64_t col_begin,
                  int64_t cols, void* destination) const;
  /// The file a tensor is in, for messages.
  std::filesystem::path file_of(const std::string& name) const;

 private:
  const SafetensorsFile& holder(const std::string& name) const;

  std::filesystem::path directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> where_;  // tensor -> index into files_
};

class Checkpoint {
 public:
  /// Opens and validates the directory: config, files, that every tensor of the model is there with
  /// the right shape and a dtype we read (f32, f16, bf16, or e4m3 with its scale for the linear
  /// layers). Tensors the model does not have are ignored, and their number logged.
  static Checkpoint open(const std::filesystem::path& directory);

  const ModelConfig& config() const { return config_; }
  const TensorFiles& tensors() const { return tensors_; }

  /// True for a weight stored as e4m3 codes with a scale.
  bool is_fp8(const std::string& weight) const;
  /// True when any of the model's linear layers is stored in FP8.
  bool has_fp8() const;

  /// A tensor of f32, f16 or bf16 as f32 (exact), rows [row_begin, +rows) of [dims[0], rest].
  std::vector<float> read_f32(const std::string& name) const;
  std::vector<float> read_rows_f32(const std::string& name, int64_t row_begin, int64_t rows) const;
  /// Rows [row_begin, +rows) and columns [col_begin, +cols) of it, packed.
  std::vector<float> read_block_f32(const std::string& name, int64_t row_begin, int64_t rows,
                                    int64_t col_begin, int64_t cols) const;
  /// All scales of an FP8 weight, as f32 (exact), [ceil(N/128), ceil(K/128)]. ConfigError for a
  /// NaN or infinite scale.
  std::vector<float> read_scales(const std::string& weight) const;
  /// Rows of any weight as f32: as read_rows_f32, or code x scale.
  std::vector<float> read_rows_dequantized(const std::string& weight, int64_t row_begin,
                                           int64_t rows) const;

 private:
  ModelConfig config_;
  TensorFiles tensors_;
};

/// "X.weight" -> "X.weight_scale_inv".
std::string scale_name(const std::string& weight);

}  // namespace rowshard
