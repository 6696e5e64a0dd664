// tests/parity/golden/*.safetensors in the tests of this room, which knows no files: the little of
// the format that is needed.
#pragma once

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "layer_test.h"

namespace rowshard::testing {

struct GoldenTensor {
  std::vector<int64_t> dims;
  Doubles values;

  Shape shape() const {
    switch (dims.size()) {
      case 1:
        return {dims[0]};
      case 2:
        return {dims[0], dims[1]};
      default:
        return {dims.at(0), dims.at(1), dims.at(2)};
    }
  }
};

class GoldenFile {
 public:
  /// ConfigError, naming the script that writes it, when there is no such file.
  GoldenFile(const std::string& name, const std::string& script) {
    const std::string path =
        message(ROWSHARD_SOURCE_DIR "/tests/parity/golden/", name, ".safetensors");
    std::ifstream in(path, std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(in), {});
    if (bytes.size() < 8)
      throw ConfigError(message(path, " is missing; tests/parity/", script, " writes it"));
    uint64_t length = 0;
    for (int i = 7; i >= 0; --i)
      length = length << 8 | static_cast<uint8_t>(bytes[i]);
    const nlohmann::json header = nlohmann::json::parse(bytes.substr(8, length));
    for (const auto& [key, entry] : header.items()) {
      if (key == "__metadata__")
        continue;
      const size_t begin = 8 + length + entry["data_offsets"][0].get<size_t>();
      const size_t end = 8 + length + entry["data_offsets"][1].get<size_t>();
      const std::string dtype = entry["dtype"];
      GoldenTensor& tensor = tensors_[key];
      tensor.dims = entry["shape"].get<std::vector<int64_t>>();
      tensor.values = dtype == "F64"   ? decode<double>(bytes, begin, end)
                      : dtype == "F32" ? decode<float>(bytes, begin, end)
                      : dtype == "I32" ? decode<int32_t>(bytes, begin, end)
                                       : throw ConfigError(key + " is " + dtype);
    }
  }
  const GoldenTensor& at(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end())
      throw ConfigError("no golden tensor " + name);
    return found->second;
  }
  size_t size() const { return tensors_.size(); }

 private:
  template <typename T>
  static Doubles decode(const std::string& bytes, size_t begin, size_t end) {
    std::vector<T> values((end - begin) / sizeof(T));
    std::copy_n(bytes.data() + begin, end - begin, reinterpret_cast<char*>(values.data()));
    return Doubles(values.begin(), values.end());
  }
  std::map<std::string, GoldenTensor> tensors_;
};

}  // namespace rowshard::testing
