// metrics.jsonl: one JSON object a line, flushed line by line, so that a run can be followed and a
// killed one keeps what it wrote. Numbers have all digits a reader needs to get the same bits back;
// one that is not finite is null. Memory is in bytes.
#pragma once

#include <filesystem>
#include <fstream>

#include "core/arena.h"

namespace rowshard {

/// One optimiser step of the whole job; memory is this rank's.
struct StepMetrics {
  int64_t step = 0;      // from 1
  double loss = 0;       // mean over the step's valid tokens of all ranks, in nats
  double grad_norm = 0;  // global, before clipping
  double lr = 0;
  int64_t tokens = 0;  // valid (trained-on) tokens of the step over all ranks
  double tokens_per_second = 0;
  double step_ms = 0;
  double exposed_comm_ms = 0;  // waited for gathers of units, and the reduction
  int64_t wire_bytes = 0;      // received by this rank
};

struct EvalMetrics {
  int64_t step = 0;  // after this many optimiser steps; 0: the base
  double eval_loss = 0;
  int64_t eval_tokens = 0;
};

class MetricsWriter {
 public:
  /// Starts the file anew; with resume_step ≥ 1 keeps the lines of the first resume_step steps, as
  /// they are, and drops what a run that died later had added. Throws Error with the path when
  /// the file cannot be written, ConfigError when a kept line is no metrics line.
  explicit MetricsWriter(std::filesystem::path path, int64_t resume_step = 0);

  /// `memory` gives {category: bytes now, peak: highest total}.
  void write(const StepMetrics& metrics, const Arena& memory);
  void write(const EvalMetrics& metrics);

 private:
  void write_line(const std::string& line);

  std::filesystem::path path_;
  std::ofstream out_;
};

}  // namespace rowshard
