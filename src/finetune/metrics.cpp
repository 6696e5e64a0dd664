#include "finetune/metrics.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace rowshard {

namespace {

using Json = nlohmann::ordered_json;

// The lines up to and including `last_step`. A line cut short by a kill can only be the last one.
std::vector<std::string> kept_lines(const std::filesystem::path& path, int64_t last_step) {
  std::vector<std::string> lines;
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    const Json entry = Json::parse(line, nullptr, false);
    const bool is_metrics =
        entry.is_object() && entry.contains("step") && entry["step"].is_number_integer();
    if (!is_metrics && in.peek() == std::ifstream::traits_type::eof())
      break;
    ROWSHARD_CHECK(is_metrics, ConfigError, path.string(), ": line ", lines.size() + 1,
                   " is no metrics line; move the file away to resume without it");
    if (entry["step"].get<int64_t>() > last_step)
      break;
    lines.push_back(line);
  }
  return lines;
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, int64_t resume_step)
    : path_(std::move(path)) {
  std::vector<std::string> lines;
  if (resume_step >= 1 && std::filesystem::exists(path_))
    lines = kept_lines(path_, resume_step);
  // Beside the old file and then over it: a kill here loses nothing.
  const std::filesystem::path fresh = path_.string() + ".new";
  out_.open(fresh, std::ios::trunc);
  for (const std::string& line : lines)
    out_ << line << '\n';
  out_.flush();
  std::error_code failure;
  if (out_)
    std::filesystem::rename(fresh, path_, failure);  // the open file moves along
  ROWSHARD_CHECK(out_ && !failure, Error, "cannot write ", path_.string(), ": ",
                 failure ? failure.message() : "is the directory there and writable?");
}

void MetricsWriter::write(const StepMetrics& metrics, const Arena& memory) {
  Json bytes;
  for (int i = 0; i < kCategoryCount; ++i) {
    const auto category = static_cast<Category>(i);
    bytes[to_string(category)] = memory.bytes(category).now;
  }
  bytes["peak"] = memory.total().peak;
  const Json line = {{"step", metrics.step},
                     {"loss", metrics.loss},
                     {"grad_norm", metrics.grad_norm},
                     {"lr", metrics.lr},
                     {"tokens", metrics.tokens},
                     {"tokens_per_second", metrics.tokens_per_second},
                     {"step_ms", metrics.step_ms},
                     {"exposed_comm_ms", metrics.exposed_comm_ms},
                     {"wire_bytes", metrics.wire_bytes},
                     {"memory", bytes}};
  write_line(line.dump());
}

void MetricsWriter::write(const EvalMetrics& metrics) {
  const Json line = {{"step", metrics.step},
                     {"eval_loss", metrics.eval_loss},
                     {"eval_tokens", metrics.eval_tokens}};
  write_line(line.dump());
}

void MetricsWriter::write_line(const std::string& line) {
  out_ << line << '\n' << std::flush;
  ROWSHARD_CHECK(out_, Error, "cannot write ", path_.string(), ": is the disk full?");
}

}  // namespace rowshard
