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
    case ReshardMode::kGroup:
      return "group";
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

  ROWSHARD_CHECK(policy.reshard != ReshardMode::kGroup || policy.group >= 2, LogicError,
                 "reshard over a group of ", policy.group);
  for (const UnitUse& use : uses) {
    ROWSHARD_CHECK(use.unit >= 0 && use.unit < unit_count, LogicError, "use of unit ", use.unit,
                   " of ", unit_count);
  }
  // The next `prefetch` units after use i, itself left out: a head whose forward is followed by its
  // own backward must not hide what comes after it.
  const auto ahead = [&](int i) {
    std::vector<int> units;
    for (int j = i + 1; j < count && static_cast<int>(units.size()) < policy.prefetch; ++j) {
      const int unit = uses[j].unit;
      if (unit != uses[i].unit && std::ranges::find(units, unit) == units.end())
        units.push_back(unit);
    }
    return units;
  };
  const auto used_after = [&](int i) {
    return std::any_of(uses.begin() + i + 1, uses.end(),
                       [&](const UnitUse& use) { return use.unit == uses[i].unit; });
  };
  // Is the unit kept after use i? Always when the next use would have it gathered anyway (the turn
  // from forward to backward, a tied head); with `false` while any use of it is still to come.
  const auto kept = [&](int i) {
    if (policy.reshard == ReshardMode::kResident)
      return true;
    if (!used_after(i))
      return false;
    if (policy.reshard == ReshardMode::kFalse || uses[i + 1].unit == uses[i].unit)
      return true;
    const std::vector<int> next = ahead(i + 1);
    return std::ranges::find(next, uses[i].unit) != next.end();
  };

  std::vector<bool> present(unit_count, policy.reshard == ReshardMode::kResident);
  for (int i = 0; i < count; ++i) {
    PlanStep step;
    step.use = uses[i];
    step.gather = !present[uses[i].unit];
    present[uses[i].unit] = true;
    for (const int unit : ahead(i)) {
      if (!present[unit]) {
        step.prefetch.push_back(unit);
        present[unit] = true;
      }
    }
    step.release = !kept(i);
    step.to_group = step.release && policy.reshard == ReshardMode::kGroup &&
                    uses[i].pass == Pass::kForward && used_after(i);
    if (step.release)
      present[uses[i].unit] = false;
    plan.steps.push_back(std::move(step));
  }
  return plan;
}

int64_t UsagePlan::peak_gathered(const std::vector<UnitLayout>& units) const {
  const auto transient = [&](int unit) { return units[unit].transient_bytes(); };
  if (policy.reshard == ReshardMode::kResident) {
    std::vector<bool> used(units.size(), false);
    for (const PlanStep& step : steps)
      used[step.use.unit] = true;
    int64_t all = 0;
    for (size_t unit = 0; unit < units.size(); ++unit)
      all += used[unit] ? transient(static_cast<int>(unit)) : 0;
    return all;
  }
  int64_t now = 0, peak = 0;
  std::vector<bool> sliced(units.size(), false);
  const auto slice = [&](int unit) {
    return units[unit].ranks() == 1 ? 0 : units[unit].gathered_bytes() / std::max(1, policy.group);
  };
  for (const PlanStep& step : steps) {
    const int unit = step.use.unit;
    if (step.gather)
      now += transient(unit);
    peak = std::max(peak, now);
    if (sliced[unit])  // gathered from the group's slices, which are free then
      now -= slice(unit);
    sliced[unit] = false;
    for (const int other : step.prefetch)
      now += transient(other);
    peak = std::max(peak, now);
    if (step.to_group) {
      now += slice(unit);
      sliced[unit] = true;
      peak = std::max(peak, now);
    }
    if (step.release)
      now -= transient(unit);
  }
  return peak;
}

int UsagePlan::gathers() const {
  int count = 0;
  for (const PlanStep& step : steps)
    count += step.gather + static_cast<int>(step.prefetch.size());
  return count;
}

const char* after(const PlanStep& step) {
  return step.to_group ? "reshard to group" : step.release ? "reshard" : "keep";
}

std::string UsagePlan::table(const std::vector<UnitLayout>& units) const {
  std::ostringstream out;
  out << "usage plan: phase " << to_string(phase) << ", reshard after forward "
      << (policy.reshard == ReshardMode::kGroup ? std::to_string(policy.group)
                                                : to_string(policy.reshard))
      << ", prefetch " << policy.prefetch << "\n";
  size_t longest = 4;
  for (const PlanStep& step : steps)
    longest = std::max(longest, units[step.use.unit].name().size());
  const auto width = static_cast<int>(longest) + 2;
  out << std::left << std::setw(12) << "pass" << std::setw(width) << "unit" << std::setw(12)
      << "its bytes" << std::setw(28) << "gathered meanwhile"
      << "after\n";
  for (const PlanStep& step : steps) {
    std::string ahead;
    for (int unit : step.prefetch)
      ahead += (ahead.empty() ? "" : ", ") + units[unit].name();
    out << std::left << std::setw(12) << to_string(step.use.pass) << std::setw(width)
        << units[step.use.unit].name() << std::setw(12) << (step.gather ? "gather" : "there")
        << std::setw(28) << (ahead.empty() ? "-" : ahead) << after(step) << "\n";
  }
  return out.str();
}

}  // namespace rowshard
