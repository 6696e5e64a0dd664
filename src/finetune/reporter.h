// Where a job's news go. The library prints nothing: the program (or a test) decides.
#pragma once

#include <string>

#include "finetune/metrics.h"
#include "finetune/progress.h"

namespace rowshard {

/// Called on every rank; an implementation usually stays quiet on all but rank 0.
class Reporter {
 public:
  virtual ~Reporter() = default;
  virtual void line(const std::string&) {}
  virtual void step(const StepMetrics&, const ProgressState&) {}
  virtual void eval(const EvalMetrics&) {}
};

}  // namespace rowshard
