#include "option_set.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <numeric>
#include <optional>

namespace rowshard {

namespace {

namespace po = boost::program_options;

template <typename Number>
Number parse_number(const std::string& name, const std::string& text, const char* what) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  ROWSHARD_CHECK(error == std::errc{} && stop == end, ConfigError, "--", name, " ",
                 text.empty() ? "''" : text, ": must be ", what);
  return value;
}

constexpr const char* kWhole = "a whole number";

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t comma; (comma = text.find(',', begin)) != std::string::npos; begin = comma + 1) {
    parts.push_back(text.substr(begin, comma - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

// Levenshtein's distance.
size_t edits(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::string without_dashes(const std::string& name) {
  return name.substr(std::min(name.find_first_not_of('-'), name.size()));
}

}  // namespace

std::string closest(const std::string& name, const std::vector<std::string>& known) {
  std::string best;
  size_t distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : known) {
    const size_t d = edits(name, candidate);
    if (d < distance) {
      best = candidate;
      distance = d;
    }
  }
  return best;
}

OptionSet::OptionSet(std::string usage, std::string summary)
    : usage_(std::move(usage)), summary_(std::move(summary)) {}

void OptionSet::section(const std::string& title) {
  sections_.emplace_back(title, 100, 60);
}

void OptionSet::add_text(const std::string& name, const std::string& value, std::string help,
                         const std::string& shown_default, Setter setter) {
  if (sections_.empty())
    section("Options");
  if (!shown_default.empty())
    help += " (default: " + shown_default + ")";
  auto* semantic = po::value<std::string>()->value_name(value);
  if (flags_.count(name))
    semantic->zero_tokens();
  sections_.back().add_options()(name.c_str(), semantic, help.c_str());
  setters_.emplace_back(name, std::move(setter));
}

void OptionSet::add(const std::string& name, const char* value, const std::string& help,
                    std::string& target, Default shown) {
  add_text(name, value, help, shown == Default::kShown ? target : "",
           [&target](const std::string& text) { target = text; });
}

void OptionSet::add(const std::string& name, const char* value, const std::string& help,
                    int64_t& target, Default shown) {
  add_text(name, value, help, shown == Default::kShown ? std::to_string(target) : "",
           [&target, name](const std::string& text) {
             target = parse_number<int64_t>(name, text, kWhole);
           });
}

void OptionSet::add(const std::string& name, const char* value, const std::string& help,
                    int& target, Default shown) {
  add_text(
      name, value, help, shown == Default::kShown ? std::to_string(target) : "",
      [&target, name](const std::string& text) { target = parse_number<int>(name, text, kWhole); });
}

void OptionSet::add(const std::string& name, const char* value, const std::string& help,
                    uint64_t& target) {
  add_text(name, value, help, std::to_string(target), [&target, name](const std::string& text) {
    target = parse_number<uint64_t>(name, text, "a whole number of at least 0");
  });
}

void OptionSet::add(const std::string& name, const char* value, const std::string& help,
                    double& target) {
  add_text(name, value, help, message(target), [&target, name](const std::string& text) {
    target = parse_number<double>(name, text, "a number");
  });
}

void OptionSet::add(const std::string& name, const std::string& help, bool& target) {
  add_text(name, "true|false", help, target ? "true" : "false",
           [&target, name](const std::string& text) {
             ROWSHARD_CHECK(text == "true" || text == "false", ConfigError, "--", name, " ", text,
                            ": use true or false");
             target = text == "true";
           });
}

void OptionSet::add(const std::string& name, const char* value, const std::string& help,
                    std::vector<std::string>& target) {
  std::string joined;
  for (const std::string& part : target)
    joined += (joined.empty() ? "" : ",") + part;
  add_text(name, value, help, joined, [&target](const std::string& text) { target = split(text); });
}

void OptionSet::add(const std::string& name, const char* value, const std::string& help,
                    std::vector<int64_t>& target) {
  add_text(name, value, help, "", [&target, name](const std::string& text) {
    target.clear();
    for (const std::string& part : split(text)) {
      target.push_back(parse_number<int64_t>(name, part, "whole numbers with commas between"));
    }
  });
}

void OptionSet::flag(const std::string& name, const std::string& help, bool& target) {
  flags_.insert(name);
  add_text(name, "", help, "", [&target, name](const std::string& text) {
    ROWSHARD_CHECK(text == "true" || text == "false", ConfigError, "--", name, "=", text,
                   ": use true or false");
    target = text == "true";
  });
}

void OptionSet::exclusive(const std::string& a, const std::string& b) {
  exclusive_.emplace_back(a, b);
}

void OptionSet::positional(const std::string& name, std::string& target) {
  positional_ = name;
  positional_target_ = &target;
}

void OptionSet::print_help(std::ostream& out) const {
  out << "usage: rowshard " << usage_ << "\n\n" << summary_ << "\n";
  for (const auto& section : sections_)
    out << "\n" << section;
  out << "\nOther:\n"
         "  --config FILE   read options from FILE, one `name = value` a line, # starts a "
         "comment;\n"
         "                  the command line wins\n"
         "  --help          print this and exit\n";
}

void OptionSet::unknown(const std::string& name, const std::string& source) const {
  std::vector<std::string> known{"help", "config"};
  for (const auto& [option, setter] : setters_)
    known.push_back(option);
  const std::string guess = closest(name, known);
  throw ConfigError(
      message(source, "there is no option --", name,
              guess.empty() ? "; --help lists them" : "; did you mean --" + guess + "?"));
}

void OptionSet::read_command_line(int argc, char** argv, Given& given) {
  po::options_description all;
  for (const auto& section : sections_)
    all.add(section);
  all.add_options()("config", po::value<std::string>(), "")("help,h", "");
  // No guessing: a prefix that is unique today is ambiguous with tomorrow's option.
  namespace style = po::command_line_style;
  const int how = style::allow_long | style::long_allow_adjacent | style::long_allow_next |
                  style::allow_short | style::allow_dash_for_short | style::short_allow_next;
  try {
    const auto parsed = po::command_line_parser(argc, argv).options(all).style(how).run();
    for (const auto& option : parsed.options) {
      if (option.position_key == -1) {
        given.emplace_back(option.string_key, option.value.empty() ? "true" : option.value[0]);
        continue;
      }
      const std::string& word = option.value[0];
      ROWSHARD_CHECK(positional_target_, ConfigError, "unexpected argument '", word,
                     "': options start with --");
      ROWSHARD_CHECK(positional_target_->empty(), ConfigError, "one ", positional_, " only, not '",
                     *positional_target_, "' and '", word, "'");
      *positional_target_ = word;
    }
  } catch (const po::unknown_option& error) {
    unknown(without_dashes(error.get_option_name()), "");
  } catch (const po::invalid_command_line_syntax& error) {
    const bool extra = error.kind() == po::invalid_command_line_syntax::extra_parameter;
    throw ConfigError(message("--", without_dashes(error.get_option_name()),
                              extra ? " takes no value" : " needs a value"));
  } catch (const po::error& error) {
    throw ConfigError(error.what());
  }
}

void OptionSet::read_file(const std::string& path, Given& given) const {
  std::ifstream in(path);
  ROWSHARD_CHECK(in, ConfigError, "--config ", path, ": cannot read this file");
  po::options_description all;
  for (const auto& section : sections_)
    all.add(section);
  try {
    const auto parsed = po::parse_config_file(in, all, true);
    for (const auto& option : parsed.options) {
      if (option.unregistered)
        unknown(option.string_key, path + ": ");
      given.emplace_back(option.string_key, option.value.empty() ? "" : option.value[0]);
    }
  } catch (const po::error& error) {
    throw ConfigError(message(path, ": ", error.what(), "; write one `name = value` a line"));
  }
}

void OptionSet::check_exclusive(const Given& given, const std::string& source) const {
  std::set<std::string> names;
  for (const auto& [name, text] : given) {
    ROWSHARD_CHECK(names.insert(name).second, ConfigError, source, "--", name,
                   " is given more than once");
  }
  for (const auto& [a, b] : exclusive_) {
    ROWSHARD_CHECK(!names.count(a) || !names.count(b), ConfigError, source, "--", a, " and --", b,
                   " exclude each other");
  }
}

bool OptionSet::parse(int argc, char** argv, std::ostream& out) {
  Given line, file;
  read_command_line(argc, argv, line);
  const auto value_of = [&](const std::string& name) -> std::optional<std::string> {
    for (const auto& [key, text] : line) {
      if (key == name)
        return text;
    }
    return std::nullopt;
  };
  if (value_of("help")) {
    print_help(out);
    return false;
  }
  check_exclusive(line, "");
  if (const auto path = value_of("config")) {
    read_file(*path, file);
    check_exclusive(file, *path + ": ");
  }
  const auto overruled = [&](const std::string& name) {
    if (value_of(name))
      return true;
    return std::ranges::any_of(exclusive_, [&](const auto& pair) {
      return (pair.first == name && value_of(pair.second)) ||
             (pair.second == name && value_of(pair.first));
    });
  };
  std::erase_if(file, [&](const auto& option) { return overruled(option.first); });
  file.insert(file.end(), line.begin(), line.end());
  for (const auto& [name, text] : file) {
    for (const auto& [known, setter] : setters_) {
      if (known == name)
        setter(text);
    }
  }
  ROWSHARD_CHECK(!positional_target_ || !positional_target_->empty(), ConfigError, positional_,
                 " is missing: usage: rowshard ", usage_);
  return true;
}

}  // namespace rowshard
