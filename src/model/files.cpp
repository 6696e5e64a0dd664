#include "model/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "core/error.h"

namespace rowshard {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const fs::path& path, const char* action, int code) {
  std::string advice;
  if (code == ENOSPC || code == EDQUOT)
    advice = "; free space on that file system";
  if (code == EACCES || code == EPERM || code == EROFS)
    advice = "; check its permissions";
  throw ConfigError(message(path.string(), ": cannot ", action, ": ",
                            std::generic_category().message(code), advice));
}

void flush_directory(const fs::path& directory) {
  const fs::path target = directory.empty() ? fs::path(".") : directory;
  FileHandle handle(::open(target.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some network file systems cannot flush a directory; the rename is then as durable as they make
  // it.
  if (handle.get() >= 0)
    (void)::fsync(handle.get());
}

void make_parent(const fs::path& path) {
  if (!path.has_parent_path())
    return;
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error)
    fail(path.parent_path(), "create the directory", error.value());
}

/// The final name without a trailing slash, which would make the last component empty.
fs::path without_trailing_slash(fs::path path) {
  return path.has_filename() || !path.has_parent_path() ? path : path.parent_path();
}

}  // namespace

void FileHandle::close() {
  if (fd_ >= 0)
    ::close(fd_);
  fd_ = -1;
}

FileHandle open_for_reading(const fs::path& path) {
  FileHandle file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0)
    fail(path, "open", errno);
  return file;
}

FileHandle create_for_writing(const fs::path& path) {
  FileHandle file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.get() < 0)
    fail(path, "create", errno);
  return file;
}

int64_t size_of_file(const FileHandle& file, const fs::path& path) {
  struct stat info;
  if (::fstat(file.get(), &info) != 0)
    fail(path, "read the size", errno);
  ROWSHARD_CHECK(S_ISREG(info.st_mode), ConfigError, path.string(), ": not a regular file");
  return info.st_size;
}

void read_at(const FileHandle& file, const fs::path& path, int64_t offset, int64_t bytes,
             void* destination) {
  auto* to = static_cast<char*>(destination);
  while (bytes > 0) {
    const ssize_t got = ::pread(file.get(), to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR)
      continue;
    if (got < 0)
      fail(path, "read", errno);
    ROWSHARD_CHECK(got > 0, ConfigError, path.string(), ": ends at byte ", offset, ", ", bytes,
                   " bytes early; it was cut while in use, copy or download it again");
    to += got;
    offset += got;
    bytes -= got;
  }
}

void write_at(const FileHandle& file, const fs::path& path, int64_t offset, int64_t bytes,
              const void* source) {
  const auto* from = static_cast<const char*>(source);
  while (bytes > 0) {
    const ssize_t put = ::pwrite(file.get(), from, static_cast<size_t>(bytes), offset);
    if (put < 0 && errno == EINTR)
      continue;
    if (put < 0)
      fail(path, "write", errno);
    from += put;
    offset += put;
    bytes -= put;
  }
}

fs::path temporary_name(const fs::path& path) {
  const fs::path base = without_trailing_slash(path);
  return base.parent_path() / message(".", base.filename().string(), ".tmp-", ::getpid());
}

void commit_file(FileHandle& file, const fs::path& temporary, const fs::path& path) {
  if (::fsync(file.get()) != 0)
    fail(temporary, "flush", errno);
  file.close();
  if (::rename(temporary.c_str(), path.c_str()) != 0)
    fail(path, "rename into place", errno);
  flush_directory(path.parent_path());
}

std::string read_text_file(const fs::path& path) {
  const FileHandle file = open_for_reading(path);
  std::string text(size_of_file(file, path), '\0');
  read_at(file, path, 0, static_cast<int64_t>(text.size()), text.data());
  return text;
}

void write_text_file(const fs::path& path, const std::string& text) {
  make_parent(path);
  const fs::path temporary = temporary_name(path);
  FileHandle file = create_for_writing(temporary);
  try {
    write_at(file, temporary, 0, static_cast<int64_t>(text.size()), text.data());
    commit_file(file, temporary, path);
  } catch (...) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    throw;
  }
}

AtomicDirectory::AtomicDirectory(fs::path path, bool replace)
    : path_(without_trailing_slash(std::move(path))),
      temporary_(temporary_name(path_)),
      replace_(replace) {
  std::error_code error;
  if (fs::exists(path_, error)) {
    ROWSHARD_CHECK(fs::is_directory(path_), ConfigError, path_.string(),
                   ": is a file, and a directory is to be written there; give another name");
    ROWSHARD_CHECK(replace_ || fs::is_empty(path_), ConfigError, path_.string(),
                   ": exists and is not empty; remove it or give another output directory");
  }
  make_parent(path_);
  fs::remove_all(temporary_, error);  // left by a killed process that had our number
  fs::create_directory(temporary_, error);
  if (error)
    fail(temporary_, "create the directory", error.value());
}

AtomicDirectory::~AtomicDirectory() {
  std::error_code ignored;
  if (!finished_)
    fs::remove_all(temporary_, ignored);
}

void AtomicDirectory::finish() {
  ROWSHARD_CHECK(!finished_, LogicError, "AtomicDirectory::finish called twice");
  flush_directory(temporary_);
  // rename replaces an empty directory; one with files is exchanged in one step where the file
  // system can, so that there is no moment without either.
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    if (!replace_ || (errno != ENOTEMPTY && errno != EEXIST)) {
      fail(path_, "rename into place", errno);
    }
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) != 0) {
      if (errno != EINVAL && errno != ENOSYS)
        fail(path_, "exchange", errno);
      const fs::path old = temporary_.string() + ".old";
      if (::rename(path_.c_str(), old.c_str()) != 0)
        fail(path_, "move aside", errno);
      if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
        fail(path_, "rename into place", errno);
      }
      std::error_code ignored;
      fs::remove_all(old, ignored);
    }
  }
  finished_ = true;
  flush_directory(path_.parent_path());
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);  // after an exchange, what was there before
}

}  // namespace rowshard
