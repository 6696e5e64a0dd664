// The usage plan: which units are gathered when, where their copies come from, and when they go.
//
// It is computed before the step from declared facts — the order in which the model uses its units,
// the phase, the reshard mode, the prefetch depth — and is what the scheduler executes. A plan can
// be printed (`rowshard plan`) and checked (`peak_gathered`) without running anything.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shard/phase.h"
#include "shard/unit_layout.h"

namespace rowshard {

/// FSDP2's reshard_after_forward, and `resident`.
enum class ReshardMode {
  kTrue,      // sharded again after forward; gathered once more in backward
  kFalse,     // stays gathered until its backward is done
  kGroup,     // after forward sharded over a smaller group; gathered over it in backward
  kResident,  // gathered once for the run
};
const char* to_string(ReshardMode mode);

/// One use of a unit by the model, in the order of execution.
struct UnitUse {
  int unit;
  Pass pass;
};

struct PlanPolicy {
  ReshardMode reshard = ReshardMode::kTrue;
  int prefetch = 1;  // units gathered ahead of the one in use
  int group = 0;     // kGroup: ranks of the smaller group
};

/// What happens around one use.
struct PlanStep {
  UnitUse use;
  bool gather = false;        // not there yet: its own gather must be issued now, unhidden
  std::vector<int> prefetch;  // units whose gathers are issued while this use computes
  bool release = false;       // reshard after this use
  bool to_group = false;      // … over the smaller group only
};

const char* after(const PlanStep& step);  // "reshard", "reshard to group", "keep"

struct UsagePlan {
  Phase phase = Phase::kTraining;
  PlanPolicy policy;
  std::vector<PlanStep> steps;

  /// `uses` is the model's order; `unit_count` bounds the unit indices.
  static UsagePlan make(Phase phase, const std::vector<UnitUse>& uses, int unit_count,
                        PlanPolicy policy);

  /// Most bytes of gathered units alive at any moment, and gathers issued, by walking the plan from
  /// an empty state (resident: from everything gathered once).
  int64_t peak_gathered(const std::vector<UnitLayout>& units) const;
  int gathers() const;
  /// A table for people: one line a use.
  std::string table(const std::vector<UnitLayout>& units) const;
};

}  // namespace rowshard
