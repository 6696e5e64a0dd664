// Files that appear as a whole or not at all: written under a temporary name beside the final one,
// flushed to the disk, then renamed. A failure is a ConfigError with the path and the system's
// reason.
#pragma once

#include <filesystem>
#include <string>
#include <utility>

namespace rowshard {

/// A file descriptor that closes itself.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int fd) : fd_(fd) {}
  ~FileHandle() { close(); }
  FileHandle(FileHandle&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  void close();

 private:
  int fd_ = -1;
};

FileHandle open_for_reading(const std::filesystem::path& path);
FileHandle create_for_writing(const std::filesystem::path& path);  // truncates what is there
int64_t size_of_file(const FileHandle& file, const std::filesystem::path& path);
/// Exactly `bytes` at `offset`; ConfigError when the file ends before.
void read_at(const FileHandle& file, const std::filesystem::path& path, int64_t offset,
             int64_t bytes, void* destination);
void write_at(const FileHandle& file, const std::filesystem::path& path, int64_t offset,
              int64_t bytes, const void* source);
/// A hidden sibling of `path`, unique to this process: ".name.tmp-PID".
std::filesystem::path temporary_name(const std::filesystem::path& path);
/// Flushes `file`, closes it, renames it to `path` and flushes the directory.
void commit_file(FileHandle& file, const std::filesystem::path& temporary,
                 const std::filesystem::path& path);

std::string read_text_file(const std::filesystem::path& path);
void write_text_file(const std::filesystem::path& path, const std::string& text);

/// A directory written as a whole: files go to `temporary()`, and `finish` renames it into place.
/// Destroyed before `finish`, it removes what was written.
class AtomicDirectory {
 public:
  /// replace: an existing directory is exchanged at `finish` and the old one removed; otherwise an
  /// existing, non-empty directory is a ConfigError here, before any work is done.
  explicit AtomicDirectory(std::filesystem::path path, bool replace = false);
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  void finish();

 private:
  std::filesystem::path path_, temporary_;
  bool replace_;
  bool finished_ = false;
};

}  // namespace rowshard
