// The training data file written by launch/prepare_data.py: samples of token ids with labels.
//
// A safetensors file: input_ids i32 [total], labels i32 [total] (at the same positions, not
// shifted; -100 is not trained), sample_offsets i64 [samples + 1], metadata format
// "rowshard.tokens" version "1". It is read as a whole and checked: a bad file is a ConfigError
// that names the file, the sample and the remedy. docs/formats.md describes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace rowshard {

inline constexpr int32_t kIgnoreLabel = -100;

class TokenFile {
 public:
  /// vocab_size: of the model; every id must be below it.
  static TokenFile open(const std::filesystem::path& path, int64_t vocab_size);

  const std::string& name() const { return name_; }  // the path, for messages
  int64_t samples() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t tokens() const { return offsets_.back(); }
  /// Labels that are trained: not -100, and not at the first position of a sample (nothing predicts
  /// it).
  int64_t trainable_tokens() const { return trainable_; }
  int64_t length(int64_t sample) const { return offsets_[sample + 1] - offsets_[sample]; }
  std::span<const int32_t> input_ids(int64_t sample) const;
  std::span<const int32_t> labels(int64_t sample) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::string name_;
  std::vector<int32_t> ids_, labels_;
  std::vector<int64_t> offsets_;
  std::map<std::string, std::string> metadata_;
  int64_t trainable_ = 0;
};

}  // namespace rowshard
