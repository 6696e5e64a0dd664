#include "shard/usage_plan.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace rowshard {

const char* to_string(ReshardMode mode) {
  switch (mode) {
    case ReshardMode::kTrue:
      return "true";
    case ReshardMode::kFalse:
      return "false";
    case ReshardMode::kResident:
      return "resident";
  }
  return "?";
}

UsagePlan UsagePlan::make(Phase phase, const std::vector<UnitUse>& uses, int unit_count,
                          PlanPolicy policy) {
  ROWSHARD_CHECK(policy.prefetch >= 0, LogicError, "prefetch depth ", policy.prefetch);
  UsagePlan plan;
  plan.phase = phase;
  plan.policy = policy;
  const int count = static_cast<int>(uses.size());

  // Is the unit kept after use i? Always when the very next use is the same unit (the turn from
  // forward to backward, a tied head); with `false` also while any use of it is still to come.
  const auto kept = [&](int i) {
    if (policy.reshard == ReshardMode::kResident)
      return true;
    for (int j = i + 1; j < count; ++j) {
      if (uses[j].unit == uses[i].unit) {
        return j == i + 1 || policy.reshard == ReshardMode::kFalse;
      }
    }
    return false;
  };

  std::vector<bool> present(unit_count, policy.reshard == ReshardMode::kResident);
  for (int i = 0; i < count; ++i) {
    PlanStep step;
    step.use = uses[i];
    ROWSHARD_CHECK(uses[i].unit >= 0 && uses[i].unit < unit_count, LogicError, "use of unit ",
                   uses[i].unit, " of ", unit_count);
    if (!present[uses[i].unit]) {
      step.gather = true;
      present[uses[i].unit] = true;
    }
    // The next `prefetch` uses are gathered while this one computes.
    for (int j = i + 1; j <= std::min(count - 1, i + policy.prefetch); ++j) {
      if (!present[uses[j].unit]) {
        step.prefetch.push_back(uses[j].unit);
        present[uses[j].unit] = true;
      }
    }
    step.release = !kept(i);
    if (step.release)
      present[uses[i].unit] = false;
    plan.steps.push_back(std::move(step));
  }
  return plan;
}

int64_t UsagePlan::peak_gathered(const std::vector<UnitLayout>& units) const {
  const auto transient = [&](int unit) {
    return units[unit].ranks() == 1 ? 0 : units[unit].gathered_bytes();
  };
  int64_t now = 0;
  if (policy.reshard == ReshardMode::kResident) {
    for (size_t unit = 0; unit < units.size(); ++unit)
      now += transient(unit);
    return now;
  }
  int64_t peak = 0;
  for (const PlanStep& step : steps) {
    if (step.gather)
      now += transient(step.use.unit);
    for (int unit : step.prefetch)
      now += transient(unit);
    peak = std::max(peak, now);
    if (step.release)
      now -= transient(step.use.unit);
  }
  return peak;
}

int UsagePlan::gathers() const {
  int count = 0;
  for (const PlanStep& step : steps)
    count += step.gather + static_cast<int>(step.prefetch.size());
  return count;
}

std::string UsagePlan::table(const std::vector<UnitLayout>& units) const {
  std::ostringstream out;
  out << "usage plan: phase " << to_string(phase) << ", reshard after forward "
      << to_string(policy.reshard) << ", prefetch " << policy.prefetch << "\n";
  out << std::left << std::setw(12) << "pass" << std::setw(16) << "unit" << std::setw(12)
      << "rowwise" << std::setw(28) << "gathered meanwhile"
      << "after\n";
  for (const PlanStep& step : steps) {
    std::string ahead;
    for (int unit : step.prefetch)
      ahead += (ahead.empty() ? "" : ", ") + units[unit].name();
    out << std::left << std::setw(12) << to_string(step.use.pass) << std::setw(16)
        << units[step.use.unit].name() << std::setw(12) << (step.gather ? "gather" : "there")
        << std::setw(28) << (ahead.empty() ? "-" : ahead) << (step.release ? "reshard" : "keep")
        << "\n";
  }
  return out.str();
}

}  // namespace rowshard
