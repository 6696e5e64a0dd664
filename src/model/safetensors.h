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

/// A file descriptor that closes itself.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int fd) : fd_(fd) {}
  ~FileHandle();
  FileHandle(FileHandle&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileHandle& operator=(FileHandle&& other) noexcept;
  int get() const { return fd_; }
  void close();

 private:
  int fd_ = -1;
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

/// Writes a file front to back without holding it in memory: the header from the declared specs
/// first, then each tensor's bytes in that order. The bytes go to a temporary name beside `path`;
/// `finish` flushes them to the disk and renames. Destroyed before that, it removes what it wrote.
/// Specs are written in the given order. {"format": "pt"} is added to the metadata unless it has
/// one.
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::filesystem::path path, std::vector<TensorSpec> specs,
                    std::map<std::string, std::string> metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) = delete;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;

  /// The next bytes of the tensor `name`, which must be the first one not yet complete (LogicError
  /// otherwise). A tensor may come in any number of pieces.
  void write(const std::string& name, const void* data, int64_t bytes);
  /// LogicError when a tensor is not complete.
  void finish();

 private:
  std::filesystem::path path_, temporary_;
  FileHandle file_;
  std::vector<TensorSpec> specs_;
  size_t current_ = 0;   // index of the tensor being written
  int64_t written_ = 0;  // bytes of it
  bool finished_ = false;
};

/// Writes a small text file atomically (temporary name, flush, rename).
void write_text_file(const std::filesystem::path& path, const std::string& text);
/// A directory written as a whole: files go to `temporary()`, a hidden sibling of the final name,
/// and `finish` renames it into place. An existing non-empty directory is a ConfigError, at
/// construction. Destroyed before `finish`, it removes what was written.
class AtomicDirectory {
 public:
  /// replace: an existing directory is replaced at `finish` (swapped aside, then removed).
  explicit AtomicDirectory(std::filesystem::path path, bool replace = false);
  ~AtomicDirectory();
  AtomicDirectory(AtomicDirectory&&) = delete;
  AtomicDirectory& operator=(AtomicDirectory&&) = delete;
  const std::filesystem::path& temporary() const { return temporary_; }
  void finish();

 private:
  std::filesystem::path path_, temporary_;
  bool replace_;
  bool finished_ = false;
};

}  // namespace rowshard
