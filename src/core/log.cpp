#include "core/log.h"

#include <mutex>
#include <set>

namespace rowshard {

namespace {
std::mutex mutex;
LogSink sink;
std::set<std::string> seen;
}  // namespace

void set_log_sink(LogSink new_sink) {
  std::lock_guard lock(mutex);
  sink = std::move(new_sink);
}

void log(const std::string& line) {
  std::lock_guard lock(mutex);
  if (sink)
    sink(line);
}

void log_once(const std::string& key, const std::string& line) {
  {
    std::lock_guard lock(mutex);
    if (!seen.insert(key).second)
      return;
  }
  log(line);
}

}  // namespace rowshard
