#include "core/environment.h"

#include <charconv>
#include <cstdlib>

#include "core/error.h"

namespace rowshard {

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value)
    return std::nullopt;
  return std::string(value);
}

std::optional<int> environment_int(const char* name) {
  const auto text = environment(name);
  if (!text)
    return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  ROWSHARD_CHECK(error == std::errc{} && end == text->data() + text->size(), ConfigError, name, "=",
                 *text, " is not an integer");
  return value;
}

std::optional<bool> environment_switch(const char* name) {
  const auto text = environment(name);
  if (!text)
    return std::nullopt;
  ROWSHARD_CHECK(*text == "0" || *text == "1", ConfigError, name, "=", *text, ": use 1 or 0");
  return *text == "1";
}

}  // namespace rowshard
