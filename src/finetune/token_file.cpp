#include "finetune/token_file.h"

#include <algorithm>

#include "core/error.h"
#include "model/safetensors.h"

namespace rowshard {

TokenFile TokenFile::open(const std::filesystem::path& path, int64_t vocab_size) {
  const std::string where = path.string();
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto meta = [&](const char* key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? std::string() : found->second;
  };
  ROWSHARD_CHECK(meta("format") == "rowshard.tokens", ConfigError, where,
                 ": a safetensors file, but no token file (its format is \"", meta("format"),
                 "\"); make one with launch/prepare_data.py");
  ROWSHARD_CHECK(meta("version") == "1", ConfigError, where, ": token file version ",
                 meta("version"), ", and this program reads version 1; prepare the data again");
  for (const char* name : {"input_ids", "labels", "sample_offsets"}) {
    ROWSHARD_CHECK(file.contains(name), ConfigError, where, ": no tensor ", name,
                   "; prepare the data again with launch/prepare_data.py");
    ROWSHARD_CHECK(file.at(name).dims.size() == 1, ConfigError, where, ": tensor ", name, " is ",
                   file.at(name).describe(), ", and one dimension is needed");
  }

  TokenFile result;
  result.name_ = where;
  result.metadata_ = file.metadata();
  result.ids_ = file.read_all<int32_t>("input_ids");
  result.labels_ = file.read_all<int32_t>("labels");
  result.offsets_ = file.read_all<int64_t>("sample_offsets");
  const auto total = static_cast<int64_t>(result.ids_.size());
  const std::vector<int64_t>& offsets = result.offsets_;
  ROWSHARD_CHECK(result.labels_.size() == result.ids_.size(), ConfigError, where, ": ", total,
                 " input_ids and ", result.labels_.size(), " labels");
  ROWSHARD_CHECK(offsets.size() >= 2, ConfigError, where, ": no samples in it");
  ROWSHARD_CHECK(offsets.front() == 0 && offsets.back() == total, ConfigError, where,
                 ": sample_offsets go from ", offsets.front(), " to ", offsets.back(),
                 ", and must go from 0 to the ", total, " tokens");
  for (int64_t sample = 0; sample < result.samples(); ++sample) {
    ROWSHARD_CHECK(offsets[sample] < offsets[sample + 1] && offsets[sample + 1] <= total,
                   ConfigError, where, ": sample ", sample, " goes from token ", offsets[sample],
                   " to ", offsets[sample + 1], "; offsets must ascend");
    for (int64_t i = offsets[sample]; i < offsets[sample + 1]; ++i) {
      const int32_t id = result.ids_[i], label = result.labels_[i];
      ROWSHARD_CHECK(id >= 0 && id < vocab_size, ConfigError, where, ": sample ", sample,
                     " has token ", id, " at position ", i - offsets[sample],
                     ", and the model has ", vocab_size,
                     "; prepare the data with this model's tokenizer");
      ROWSHARD_CHECK(label == kIgnoreLabel || label == id, ConfigError, where, ": sample ", sample,
                     " has label ", label, " at position ", i - offsets[sample],
                     ", where the token is ", id,
                     "; a label is its own token or -100 (labels are not shifted in the file)");
      if (label != kIgnoreLabel && i > offsets[sample])
        ++result.trainable_;
    }
  }
  ROWSHARD_CHECK(result.trainable_ > 0, ConfigError, where, ": none of its ", total,
                 " tokens is trained (every label is -100); check the roles in the data");
  return result;
}

std::span<const int32_t> TokenFile::input_ids(int64_t sample) const {
  return std::span(ids_).subspan(offsets_[sample], length(sample));
}

std::span<const int32_t> TokenFile::labels(int64_t sample) const {
  return std::span(labels_).subspan(offsets_[sample], length(sample));
}

}  // namespace rowshard
