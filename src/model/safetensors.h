// The safetensors file format: u64 little-endian header length, JSON header, tensor bytes.
//
// A reader checks the whole header before any tensor is used: lengths, dtype tags, shapes, and that
// the tensors' byte ranges cover the data exactly, without overlap or hole. What is wrong with a
// file is a ConfigError that names the file, the tensor and the remedy. Reads are ranged preads, so
// that every rank reads only the bytes it keeps; they may come from several threads.
// Layout: https://huggingface.co/docs/safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/view.h"
#include "model/files.h"

namespace rowshard {

/// The tag of a dtype in a file ("BF16", "F8_E4M3", …), and back; ConfigError for a tag that no
/// DType stands for.
const char* safetensors_tag(DType dtype);
DType dtype_of_tag(const std::string& tag);

struct TensorInfo {
  std::string name;
  std::string tag;            // as in the file; also BOOL, I8, U32 and others that have no DType
  std::vector<int64_t> dims;  // any rank
  int64_t offset = 0;         // from the start of the file
  int64_t bytes = 0;

  DType dtype() const;  // ConfigError for a tag without a DType
  Shape shape() const;  // ConfigError for more than 4 dimensions
  int64_t elements() const;
  std::string describe() const;  // "BF16 [4, 8]"
};

class SafetensorsFile {
 public:
  /// Opens and validates; the file stays open for reads as long as this object lives.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }
  const TensorInfo& at(const std::string& name) const;  // ConfigError when absent

  /// `byte_count` bytes of a tensor, from its byte `byte_begin` on, to host memory.
  void read(const std::string& name, int64_t byte_begin, int64_t byte_count,
            void* destination) const;
  /// A whole tensor; ConfigError when its dtype is not T's.
  template <typename T>
  std::vector<T> read_all(const std::string& name) const {
    check_dtype(name, DTypeOf<T>::value);
    std::vector<T> values(at(name).elements());
    read(name, 0, at(name).bytes, values.data());
    return values;
  }

 private:
  void check_dtype(const std::string& name, DType wanted) const;

  std::filesystem::path path_;
  FileHandle file_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

struct TensorSpec {
  std::string name;
  std::string tag;  // dtype tag, e.g. safetensors_tag(DType::kBF16)
  std::vector<int64_t> dims;

  int64_t bytes() const;
};

/// Writes a file without holding it in memory: the header comes from the declared specs, then
/// tensors are written in any order, each front to back. They are laid out by element size and
/// name, as the reference writer does, so that every element is aligned. The bytes go to a
/// temporary name beside `path`; `finish` flushes them to the disk and renames. Destroyed before
/// that, it removes what it wrote. {"format": "pt"} is added to the metadata unless it has a
/// format.
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::filesystem::path path, const std::vector<TensorSpec>& specs,
                    std::map<std::string, std::string> metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// The next bytes of a tensor, in any number of pieces. LogicError for an unknown name or too
  /// many bytes.
  void write(const std::string& name, const void* data, int64_t bytes);
  /// LogicError when a tensor is not complete.
  void finish();

 private:
  struct Slot {
    int64_t offset = 0;  // from the start of the file
    int64_t bytes = 0;
    int64_t written = 0;
  };
  std::filesystem::path path_, temporary_;
  FileHandle file_;
  std::map<std::string, Slot> slots_;
  bool finished_ = false;
};

}  // namespace rowshard
