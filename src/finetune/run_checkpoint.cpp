#include "finetune/run_checkpoint.h"

#include <algorithm>
#include <charconv>

#include "model/files.h"
#include "model/safetensors.h"

namespace rowshard {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPrefix = "checkpoint-";
constexpr const char* kStateFile = "state.safetensors";
constexpr const char* kFormat = "rowshard.run";

// The step of a directory named checkpoint-<step>, or -1.
int64_t step_of(const fs::path& directory) {
  const std::string name = directory.filename().string();
  if (name.rfind(kPrefix, 0) != 0)
    return -1;
  int64_t step = 0;
  const char* begin = name.data() + std::string(kPrefix).size();
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(begin, end, step);
  return error == std::errc{} && stop == end ? step : -1;
}

std::vector<std::pair<int64_t, fs::path>> checkpoints(const fs::path& output) {
  std::vector<std::pair<int64_t, fs::path>> found;
  if (!fs::is_directory(output))
    return found;
  for (const auto& entry : fs::directory_iterator(output)) {
    const int64_t step = entry.is_directory() ? step_of(entry.path()) : -1;
    if (step >= 0)
      found.emplace_back(step, entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

void write_run_state(const fs::path& directory, const RunState& state) {
  AtomicDirectory target(directory, true);
  const int64_t count = static_cast<int64_t>(state.parameters.size());
  SafetensorsWriter writer(
      target.temporary() / kStateFile,
      {{"parameters", "F32", {count}}, {"m", "F32", {count}}, {"v", "F32", {count}}},
      {{"format", kFormat},
       {"step", std::to_string(state.step)},
       {"epoch", std::to_string(state.position.epoch)},
       {"row", std::to_string(state.position.row)},
       {"seed", std::to_string(state.seed)}});
  writer.write("parameters", state.parameters.data(), count * 4);
  writer.write("m", state.m.data(), count * 4);
  writer.write("v", state.v.data(), count * 4);
  writer.finish();
  target.finish();
}

RunState read_run_state(const fs::path& directory, int64_t trainable) {
  ROWSHARD_CHECK(fs::is_directory(directory), ConfigError, "--resume ", directory.string(),
                 ": no such directory");
  const SafetensorsFile file = SafetensorsFile::open(directory / kStateFile);
  const auto read = [&](const char* key, auto& value) {
    const auto entry = file.metadata().find(key);
    bool good = entry != file.metadata().end();
    if (good) {
      const std::string& text = entry->second;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      good = error == std::errc{} && end == text.data() + text.size();
    }
    ROWSHARD_CHECK(good, ConfigError, file.path().string(), ": no ", key,
                   " in its metadata; it is not a run's checkpoint");
  };
  RunState state;
  state.parameters = file.read_all<float>("parameters");
  state.m = file.read_all<float>("m");
  state.v = file.read_all<float>("v");
  const auto fits = [&](const std::vector<float>& values) {
    return static_cast<int64_t>(values.size()) == trainable;
  };
  ROWSHARD_CHECK(fits(state.parameters) && fits(state.m) && fits(state.v), ConfigError,
                 file.path().string(), " holds ", state.parameters.size(),
                 " parameters, this run has ", trainable,
                 "; resume with the same model, --lora-r and --target-modules");
  read("step", state.step);
  read("epoch", state.position.epoch);
  read("row", state.position.row);
  read("seed", state.seed);
  return state;
}

std::optional<fs::path> checkpoint_to_resume(const std::string& resume, const fs::path& output) {
  if (resume == "none")
    return std::nullopt;
  if (resume != "auto")
    return fs::path(resume);
  const auto found = checkpoints(output);
  if (found.empty())
    return std::nullopt;
  return found.back().second;
}

void keep_newest_checkpoints(const fs::path& output, int64_t keep) {
  const auto found = checkpoints(output);
  const int64_t surplus = static_cast<int64_t>(found.size()) - keep;
  for (int64_t i = 0; i < surplus; ++i)
    fs::remove_all(found[i].second);
}

}  // namespace rowshard
