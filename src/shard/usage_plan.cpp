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
                          PlanPolicy policy, Follows follows) {
  ROWSHARD_CHECK(policy.prefetch >= 0, LogicError, "prefetch depth ", policy.prefetch);
  UsagePlan plan;
  plan.phase = phase;
  plan.policy = policy;
  plan.follows = follows;
  const int count = static_cast<int>(uses.size());

  ROWSHARD_CHECK(policy.reshard != ReshardMode::kGroup || policy.group >= 2, LogicError,
                 "reshard over a group of ", policy.group);
  ROWSHARD_CHECK(!policy.keep || policy.reshard == ReshardMode::kFalse, LogicError,
                 "units are kept over micro-batches with reshard ", to_string(policy.reshard));
  for (const UnitUse& use : uses) {
    ROWSHARD_CHECK(use.unit >= 0 && use.unit < unit_count, LogicError, "use of unit ", use.unit,
                   " of ", unit_count);
  }
  const bool keeps = policy.keep && follows == Follows::kMicroBatch;
  const bool wraps = follows != Follows::kNothing && policy.reshard != ReshardMode::kResident &&
                     policy.prefetch > 0;
  const auto add = [](std::vector<int>& units, int unit) {
    if (std::ranges::find(units, unit) == units.end())
      units.push_back(unit);
  };
  const auto holds = [](const std::vector<int>& units, int unit) {
    return std::ranges::find(units, unit) != units.end();
  };
  for (int i = 0; wraps && i < count && static_cast<int>(plan.opening.size()) <= policy.prefetch;
       ++i)
    add(plan.opening, uses[i].unit);
  // The next `prefetch` units after use i, itself left out: a head whose forward is followed by its
  // own backward must not hide what comes after it. After the last use come those of the next pass.
  const auto ahead = [&](int i) {
    std::vector<int> units;
    const int end = wraps ? i + count : count;
    for (int j = i + 1; j < end && static_cast<int>(units.size()) < policy.prefetch; ++j) {
      if (uses[j % count].unit != uses[i].unit)
        add(units, uses[j % count].unit);
    }
    return units;
  };
  const auto used_after = [&](int i) {
    return std::any_of(uses.begin() + i + 1, uses.end(),
                       [&](const UnitUse& use) { return use.unit == uses[i].unit; });
  };
  // Is the unit kept after use i? Always when the next use would have it gathered anyway (the turn
  // from forward to backward, a tied head, the turn to the next pass); with `false` while any use
  // of it is still to come.
  const auto kept = [&](int i) {
    if (policy.reshard == ReshardMode::kResident || keeps)
      return true;
    if (used_after(i) &&
        (policy.reshard == ReshardMode::kFalse || uses[i + 1].unit == uses[i].unit))
      return true;
    return holds(i + 1 < count ? ahead(i + 1) : plan.opening, uses[i].unit);
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
  for (const int unit : plan.opening) {
    if (!present[unit])
      plan.closing.push_back(unit);
  }
  return plan;
}

int64_t UsagePlan::peak_gathered(const std::vector<UnitLayout>& units) const {
  const auto transient = [&](int unit) { return units[unit].transient_bytes(); };
  if (policy.reshard == ReshardMode::kResident || policy.keep) {
    std::vector<bool> used(units.size(), false);
    for (const PlanStep& step : steps)
      used[step.use.unit] = true;
    int64_t all = 0;
    for (size_t unit = 0; unit < units.size(); ++unit)
      all += used[unit] ? transient(static_cast<int>(unit)) : 0;
    return all;
  }
  int64_t now = 0, peak = 0;
  const auto add = [&](int64_t bytes) {
    now += bytes;
    peak = std::max(peak, now);
  };
  std::vector<bool> sliced(units.size(), false);
  const auto slice = [&](int unit) {
    return units[unit].ranks() == 1 ? 0 : units[unit].gathered_bytes() / std::max(1, policy.group);
  };
  for (const PlanStep& step : steps) {
    const int unit = step.use.unit;
    if (step.gather)
      add(transient(unit));
    if (sliced[unit])  // gathered from the group's slices, which are free then
      now -= slice(unit);
    sliced[unit] = false;
    for (const int other : step.prefetch)
      add(transient(other));
    if (step.to_group) {
      add(slice(unit));
      sliced[unit] = true;
    }
    if (step.release)
      now -= transient(unit);
  }
  for (const int unit : closing)
    add(transient(unit));
  return peak;
}

int UsagePlan::gathers() const {
  int count = static_cast<int>(closing.size());
  for (const PlanStep& step : steps)
    count += step.gather + static_cast<int>(step.prefetch.size());
  return count;
}

const char* to_string(Follows follows) {
  switch (follows) {
    case Follows::kNothing:
      return "nothing";
    case Follows::kMicroBatch:
      return "micro-batch";
    case Follows::kStep:
      return "step";
  }
  return "?";
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
  const auto names = [&](const std::vector<int>& list) {
    std::string text;
    for (const int unit : list)
      text += (text.empty() ? "" : ", ") + units[unit].name();
    return text.empty() ? "-" : text;
  };
  // The pass before was like this one and has left what this one begins with.
  std::vector<int> left = opening;
  for (const PlanStep& step : steps) {
    const bool there = !step.gather || std::erase(left, step.use.unit) > 0;
    std::vector<int> ahead = step.prefetch;
    std::erase_if(ahead, [&](int unit) { return std::erase(left, unit) > 0; });
    out << std::left << std::setw(12) << to_string(step.use.pass) << std::setw(width)
        << units[step.use.unit].name() << std::setw(12) << (there ? "there" : "gather")
        << std::setw(28) << names(ahead) << after(step) << "\n";
  }
  if (!opening.empty())
    out << "left for the next pass: " << names(opening) << "\n";
  return out.str();
}

}  // namespace rowshard
