// News of a job for a person: rank 0 prints lines on stdout, and a progress bar on stderr when that
// is a terminal. Without one, a step is a line now and then, so that a log stays short.
#pragma once

#include <optional>

#include "finetune/reporter.h"

namespace rowshard {

class Console : public Reporter {
 public:
  explicit Console(bool speaks);  // only rank 0 does

  void line(const std::string& text) override;
  void step(const StepMetrics& metrics, const ProgressState& progress) override;
  void eval(const EvalMetrics& metrics) override;

 private:
  bool speaks_;
  std::optional<ProgressBar> bar_;
};

}  // namespace rowshard
