#include "tokenizer.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>

#include "core/error.h"

extern char** environ;

namespace rowshard {

namespace {

namespace fs = std::filesystem;

constexpr const char* kRemedy = "; run launch/setup, or give --prompt-ids";

// The launch folder of the source tree that this program was built in: build/PRESET/rowshard.
fs::path launch_folder() {
  std::error_code error;
  for (fs::path at = fs::read_symlink("/proc/self/exe", error).parent_path();
       !at.empty() && at != at.root_path(); at = at.parent_path()) {
    if (fs::exists(at / "launch" / "tokenize.py"))
      return at / "launch";
  }
  throw ConfigError(
      "text needs launch/tokenize.py, which is not above this program: give --prompt-ids");
}

// The last line of a file that a child wrote: in Python that is what went wrong.
std::string last_line(std::FILE* file) {
  std::string text, line;
  std::rewind(file);
  for (int c; (c = std::fgetc(file)) != EOF;) {
    if (c == '\n') {
      if (!text.empty())
        line = text;
      text.clear();
    } else {
      text += static_cast<char>(c);
    }
  }
  return text.empty() ? line : text;
}

// Standard output of launch/tokenize.py.
std::string run_tokenize(std::vector<std::string> arguments) {
  const std::string folder = launch_folder().string();
  // Arguments travel as positional parameters: no quoting, nothing of the text is read by the
  // shell.
  std::vector<std::string> command{"bash", "-c",
                                   "set -euo pipefail; source \"$0/common.sh\"; exec "
                                   "\"$(venv_python)\" \"$0/tokenize.py\" \"$@\"",
                                   folder};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : command)
    argv.push_back(word.data());
  argv.push_back(nullptr);

  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> errors(std::tmpfile(), std::fclose);
  ROWSHARD_CHECK(errors, Error, "cannot make a temporary file: ", std::strerror(errno));
  int pipe_ends[2];
  ROWSHARD_CHECK(pipe(pipe_ends) == 0, Error, "pipe: ", std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fileno(errors.get()), STDERR_FILENO);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[0]);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[1]);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, "bash", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  std::string output;
  if (!failed) {
    char buffer[4096];
    for (ssize_t count; (count = read(pipe_ends[0], buffer, sizeof(buffer))) > 0;) {
      output.append(buffer, static_cast<size_t>(count));
    }
  }
  close(pipe_ends[0]);
  ROWSHARD_CHECK(!failed, ConfigError,
                 "cannot start bash for launch/tokenize.py: ", std::strerror(failed), kRemedy);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  ROWSHARD_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, ConfigError,
                 last_line(errors.get()), kRemedy);
  while (!output.empty() && output.back() == '\n')
    output.pop_back();
  return output;
}

}  // namespace

std::string join_ids(const std::vector<int32_t>& ids) {
  std::ostringstream text;
  for (size_t i = 0; i < ids.size(); ++i) {
    text << (i ? "," : "") << ids[i];
  }
  return text.str();
}

std::vector<int32_t> encode_text(const std::string& model, const std::string& text, bool chat) {
  std::vector<std::string> arguments{"encode", "--model", model};
  if (chat)
    arguments.push_back("--chat");
  arguments.insert(arguments.end(), {"--", text});
  const std::string output = run_tokenize(arguments);
  std::vector<int32_t> ids;
  const char* at = output.data();
  const char* end = at + output.size();
  while (at < end) {
    const auto [stop, error] = std::from_chars(at, end, ids.emplace_back());
    ROWSHARD_CHECK(error == std::errc{} && (stop == end || *stop == ','), Error,
                   "launch/tokenize.py printed no ids: ", output);
    at = stop + 1;
  }
  return ids;
}

std::string decode_ids(const std::string& model, const std::vector<int32_t>& ids) {
  return run_tokenize({"decode", "--model", model, "--ids", join_ids(ids)});
}

}  // namespace rowshard
