#include "shard/usage_scheduler.h"

namespace rowshard {

UsageScheduler::UsageScheduler(std::vector<ShardedUnit*> units, Stream& compute)
    : units_(std::move(units)),
      compute_(compute),
      communication_(compute.device(), "gather", -1),
      released_(compute.device()),
      left_(units_.size(), false) {}

void UsageScheduler::begin(const UsagePlan& plan) {
  ROWSHARD_CHECK(!plan_, LogicError, "the scheduler is still executing a plan");
  ROWSHARD_CHECK(plan.follows != Follows::kStep || !compute_.capturing(), LogicError,
                 "a recorded step must not leave gathers for the next one");
  // Only a training step's waits are reported, over all its micro-batches.
  if (plan.phase != Phase::kTraining)
    waits_used_ = 0;
  released_.record(compute_);
  const bool resident = plan.policy.reshard == ReshardMode::kResident;
  std::vector<bool> used(units_.size(), false);
  for (const PlanStep& step : plan.steps)
    used[step.use.unit] = true;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (resident && used[unit]) {
      gather_unless_there(static_cast<int>(unit));
      if (units_[unit]->gathering())
        units_[unit]->finish_gather(compute_);
    }
    // A unit kept from another mode or an interrupted pass would not be where the plan says.
    if (!resident && !units_[unit]->at_shard() && !(left_[unit] && used[unit]))
      units_[unit]->reshard();
    if (plan.phase == Phase::kInference)
      units_[unit]->drop_columnwise();
  }
  left_.assign(units_.size(), false);
  plan_ = &plan;
  position_ = 0;
  in_use_ = false;
}

const PlanStep& UsageScheduler::expect(int unit, Pass pass, const char* call) const {
  ROWSHARD_CHECK(plan_, LogicError, call, " of unit ", units_.at(unit)->name(),
                 " outside begin … finish");
  ROWSHARD_CHECK(position_ < plan_->steps.size(), LogicError, call, " of unit ",
                 units_.at(unit)->name(), " after the last use of the plan");
  const PlanStep& step = plan_->steps[position_];
  ROWSHARD_CHECK(step.use.unit == unit && step.use.pass == pass, LogicError, call, " of unit ",
                 units_.at(unit)->name(), " in ", to_string(pass), ", but use ", position_,
                 " of the plan is unit ", units_[step.use.unit]->name(), " in ",
                 to_string(step.use.pass));
  return step;
}

void UsageScheduler::gather(int unit) {
  communication_.wait(released_);
  units_[unit]->gather(communication_);
}

void UsageScheduler::gather_unless_there(int unit) {
  if (!units_[unit]->gathering() && !units_[unit]->gathered())
    gather(unit);
}

// What compute waits for is between two marks on its own stream: on cuda the host is long gone.
void UsageScheduler::wait_for_gather(int unit) {
  if (units_[unit]->layout().ranks() == 1) {  // nothing travels
    units_[unit]->finish_gather(compute_);
    return;
  }
  if (waits_used_ == waits_.size()) {
    waits_.emplace_back(Event(compute_.device(), true), Event(compute_.device(), true));
  }
  auto& [begin, end] = waits_[waits_used_++];
  TraceSpan span(compute_, TraceLane::kUnits, "wait");
  begin.record(compute_);
  compute_.wait(begin);  // on the host the mark takes over what was pending; nothing may be lost
  units_[unit]->finish_gather(compute_);
  end.record(compute_);
}

double UsageScheduler::exposed_seconds() const {
  double ms = 0;
  for (size_t i = 0; i < waits_used_; ++i)
    ms += elapsed_ms(waits_[i].first, waits_[i].second);
  return ms * 1e-3;
}

ShardedUnit& UsageScheduler::acquire(int unit, Pass pass) {
  const PlanStep& step = expect(unit, pass, "acquire");
  ROWSHARD_CHECK(!in_use_, LogicError, "acquire of unit ", units_[unit]->name(),
                 " before the last one was released");
  in_use_ = true;
  if (step.gather)
    gather_unless_there(unit);
  if (units_[unit]->gathering())
    wait_for_gather(unit);
  for (int ahead : step.prefetch)
    gather_unless_there(ahead);
  if (Trace::active()) {
    span_ =
        TraceSpan(compute_, TraceLane::kUnits, message(units_[unit]->name(), " ", to_string(pass)));
  }
  return *units_[unit];
}

void UsageScheduler::release(int unit, Pass pass) {
  const PlanStep& step = expect(unit, pass, "release");
  ROWSHARD_CHECK(in_use_, LogicError, "release of unit ", units_[unit]->name(),
                 " that was not acquired");
  in_use_ = false;
  span_.end();
  if (step.to_group) {
    units_[unit]->reshard_to_group(compute_);
  } else if (step.release) {
    units_[unit]->reshard();
  }
  // Also after a unit that stays: what this use freed may be the next gather's memory.
  released_.record(compute_);
  ++position_;
}

void UsageScheduler::finish() {
  ROWSHARD_CHECK(plan_ && position_ == plan_->steps.size() && !in_use_, LogicError, "finish after ",
                 position_, " uses of a plan of ", plan_ ? plan_->steps.size() : 0);
  for (const int unit : plan_->closing)
    gather_unless_there(unit);
  for (size_t unit = 0; unit < units_.size(); ++unit)
    left_[unit] = plan_->follows != Follows::kNothing &&
                  plan_->policy.reshard != ReshardMode::kResident && !units_[unit]->at_shard();
  plan_ = nullptr;
}

void UsageScheduler::drop_left() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (left_[unit])
      units_[unit]->reshard();
    left_[unit] = false;
  }
}

void UsageScheduler::abort() noexcept {
  for (ShardedUnit* unit : units_) {
    const bool resident = plan_ && plan_->policy.reshard == ReshardMode::kResident;
    try {
      if (!resident)
        unit->reshard();
    } catch (...) {  // a gather that failed is what brought us here
    }
  }
  plan_ = nullptr;
  left_.assign(units_.size(), false);
  position_ = 0;
  in_use_ = false;
  span_ = TraceSpan();
}

}  // namespace rowshard
