// Typed exceptions. The library throws and never prints or exits; `launch` turns them into one line
// and an exit code. A message names the thing, its shapes and values, and what to do about it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace rowshard {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What the user gave is wrong: an option, a file, a model. Exit code 2.
class ConfigError : public Error {
 public:
  using Error::Error;
};
/// Shapes, dtypes or devices of operands do not fit together.
class ShapeError : public Error {
 public:
  using Error::Error;
};
/// A CUDA, cuBLAS or memory failure, or a device that is not there.
class DeviceError : public Error {
 public:
  using Error::Error;
};
/// A contract of ours was broken by our own caller.
class LogicError : public Error {
 public:
  using Error::Error;
};

/// "a", 3, " b" -> "a3 b".
template <typename... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace rowshard

/// Throws ErrorType with the concatenated parts when the condition does not hold.
#define ROWSHARD_CHECK(condition, ErrorType, ...)        \
  do {                                                   \
    if (!(condition))                                    \
      throw ErrorType(::rowshard::message(__VA_ARGS__)); \
  } while (0)
