#include "finetune/schedule.h"

#include <cmath>
#include <numbers>

#include "core/error.h"

namespace rowshard {

Schedule::Schedule(LrSchedule shape, double lr, int64_t warmup_steps, int64_t max_steps)
    : shape_(shape), lr_(lr), warmup_steps_(warmup_steps), max_steps_(max_steps) {
  ROWSHARD_CHECK(max_steps >= 1, ConfigError, "a schedule of ", max_steps,
                 " steps: the data must give at least one optimiser step");
  ROWSHARD_CHECK(warmup_steps >= 0 && warmup_steps <= max_steps, ConfigError, "--warmup-steps ",
                 warmup_steps, " is outside the run of ", max_steps, " steps");
}

double Schedule::lr(int64_t step) const {
  ROWSHARD_CHECK(step >= 1 && step <= max_steps_, LogicError, "learning rate of step ", step,
                 " of ", max_steps_);
  const int64_t t = step - 1;
  if (t < warmup_steps_)
    return lr_ * static_cast<double>(t) / static_cast<double>(warmup_steps_);
  // t ≥ W and t < S, so S - W > 0 from here on.
  const double decay_steps = static_cast<double>(max_steps_ - warmup_steps_);
  const double progress = static_cast<double>(t - warmup_steps_) / decay_steps;
  switch (shape_) {
    case LrSchedule::kConstant:
      return lr_;
    case LrSchedule::kLinear:
      return lr_ * static_cast<double>(max_steps_ - t) / decay_steps;
    case LrSchedule::kCosine:
      return lr_ * 0.5 * (1 + std::cos(std::numbers::pi * progress));
  }
  throw LogicError("unknown schedule");
}

}  // namespace rowshard
