// Environment variables, read at the call and never cached: tests and job scripts change them.
#pragma once

#include <optional>
#include <string>

namespace rowshard {

std::optional<std::string> environment(const char* name);
/// An integer variable; ConfigError when it is set and no integer.
std::optional<int> environment_int(const char* name);
/// A switch: exactly "1" or "0"; ConfigError on anything else.
std::optional<bool> environment_switch(const char* name);

}  // namespace rowshard
