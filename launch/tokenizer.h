// Text to ids and back, by launch/tokenize.py: tokenising is Python's job, and only text needs it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rowshard {

/// ConfigError with the remedy when Python, its packages or the model's tokenizer are missing.
std::vector<int32_t> encode_text(const std::string& model, const std::string& text, bool chat);
std::string decode_ids(const std::string& model, const std::vector<int32_t>& ids);

/// "1,2,3"
std::string join_ids(const std::vector<int32_t>& ids);

}  // namespace rowshard
