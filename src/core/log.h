// Notices of the library (a slower path taken, a variable overridden) go to one sink; the library
// itself never prints. `launch` installs a sink; without one, notices are dropped.
#pragma once

#include <functional>
#include <string>

namespace rowshard {

using LogSink = std::function<void(const std::string& line)>;
void set_log_sink(LogSink sink);
void log(const std::string& line);
/// At most once a process for a key: slower paths are named once, with their reason.
void log_once(const std::string& key, const std::string& line);

}  // namespace rowshard
