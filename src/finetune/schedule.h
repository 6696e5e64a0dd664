// Learning rate of each optimiser step, with linear warm-up.
//
// The closed forms of transformers' get_{constant,linear,cosine}_schedule_with_warmup, where the
// first step is index 0: with t = step - 1, warm-up W and S steps in all,
//   t < W      lr · t / W                                   (step 1 of a warm-up has lr 0)
//   constant   lr
//   linear     lr · (S - t) / (S - W)
//   cosine     lr · (1 + cos(π (t - W) / (S - W))) / 2
// so that the curves of a run here and of one there can be laid over each other.
#pragma once

#include <cstdint>

#include "finetune/options.h"

namespace rowshard {

class Schedule {
 public:
  /// Throws ConfigError unless max_steps ≥ 1 and 0 ≤ warmup_steps ≤ max_steps.
  Schedule(LrSchedule shape, double lr, int64_t warmup_steps, int64_t max_steps);

  /// step in 1 … max_steps; LogicError otherwise.
  double lr(int64_t step) const;

 private:
  LrSchedule shape_;
  double lr_;
  int64_t warmup_steps_;
  int64_t max_steps_;
};

}  // namespace rowshard
