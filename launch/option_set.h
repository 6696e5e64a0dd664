// The options of one command, on Boost.Program_options: declared once with their target, they give
// --help (with the target's value as the default), the command line and --config FILE.
//
// Every error is one ConfigError that names the option and says what it takes; an unknown option is
// answered with the closest one. A value on the command line wins over the file.
#pragma once

#include <boost/program_options.hpp>
#include <cstdint>
#include <functional>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace rowshard {

/// The known name with the fewest edits away from `name`; "" when none is close.
std::string closest(const std::string& name, const std::vector<std::string>& known);

class OptionSet {
 public:
  /// `usage` follows "usage: rowshard " ("merge --model DIR ..."), `summary` says what it does.
  OptionSet(std::string usage, std::string summary);

  /// Title in --help of the options added from here on.
  void section(const std::string& title);

  // The target holds the default, which --help shows unless it is empty or `hide_default` follows.
  enum class Default { kShown, kHidden };
  void add(const std::string& name, const char* value, const std::string& help, std::string& target,
           Default shown = Default::kShown);
  void add(const std::string& name, const char* value, const std::string& help, int64_t& target,
           Default shown = Default::kShown);
  void add(const std::string& name, const char* value, const std::string& help, int& target,
           Default shown = Default::kShown);
  void add(const std::string& name, const char* value, const std::string& help, uint64_t& target);
  void add(const std::string& name, const char* value, const std::string& help, double& target);
  /// true|false, given with its value.
  void add(const std::string& name, const std::string& help, bool& target);
  /// Comma-separated.
  void add(const std::string& name, const char* value, const std::string& help,
           std::vector<std::string>& target);
  void add(const std::string& name, const char* value, const std::string& help,
           std::vector<int64_t>& target);
  /// A value with a parser of its own, which throws ConfigError.
  template <typename T>
  void add_choice(const std::string& name, const char* values, const std::string& help, T& target,
                  T (*parse)(const std::string&)) {
    add_text(name, values, help, to_string(target),
             [&target, parse](const std::string& text) { target = parse(text); });
  }
  /// Off unless named (--json); `json = true` in a file.
  void flag(const std::string& name, const std::string& help, bool& target);

  /// At most one of the two, in one source; a name on the command line silences the other one in
  /// the file.
  void exclusive(const std::string& a, const std::string& b);
  /// An argument without a name, which must be there; at most one.
  void positional(const std::string& name, std::string& target);

  /// False when --help was asked for and printed on `out`. argv[0] is not looked at.
  bool parse(int argc, char** argv, std::ostream& out);
  void print_help(std::ostream& out) const;

 private:
  using Setter = std::function<void(const std::string& text)>;
  using Given = std::vector<std::pair<std::string, std::string>>;  // name, text

  void add_text(const std::string& name, const std::string& value, std::string help,
                const std::string& shown_default, Setter setter);
  void read_command_line(int argc, char** argv, Given& given);
  void read_file(const std::string& path, Given& given) const;
  void check_exclusive(const Given& given, const std::string& source) const;
  [[noreturn]] void unknown(const std::string& name, const std::string& source) const;

  std::string usage_, summary_;
  std::vector<boost::program_options::options_description> sections_;
  std::vector<std::pair<std::string, Setter>> setters_;
  std::set<std::string> flags_;
  std::vector<std::pair<std::string, std::string>> exclusive_;
  std::string positional_;
  std::string* positional_target_ = nullptr;
};

}  // namespace rowshard
