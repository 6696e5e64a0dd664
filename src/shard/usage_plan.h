// The usage plan: which units are gathered when, where their copies come from, and when they go.
//
// It is computed before the step from declared facts — the order in which the model uses its units,
// the phase, the reshard mode, the prefetch depth, what follows — and is what the scheduler
// executes. A plan can be printed (`rowshard plan`) and checked (`peak_gathered`) without running
// anything.
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

/// What the caller does when this pass is over, declared by the caller: a pass of the same uses, or
/// something else. Nothing is gathered ahead, and nothing left, over the end of a pass that nothing
/// follows.
enum class Follows {
  kNothing,
  kMicroBatch,  // the same pass again, without an update in between
  kStep,        // the same pass again, after whatever the caller does between steps
};

const char* to_string(Follows follows);

struct PlanPolicy {
  ReshardMode reshard = ReshardMode::kTrue;
  int prefetch = 2;   // units gathered ahead of the one in use
  int group = 0;      // kGroup: ranks of the smaller group
  bool keep = false;  // kFalse: units stay gathered from one micro-batch of a step to the next
};

/// What happens around one use.
struct PlanStep {
  UnitUse use;
  bool gather = false;        // not there yet, unless the pass before left it: gathered unhidden
  std::vector<int> prefetch;  // units whose gathers are issued while this use computes
  bool release = false;       // reshard after this use
  bool to_group = false;      // … over the smaller group only
};

const char* after(const PlanStep& step);  // "reshard", "reshard to group", "keep"

struct UsagePlan {
  Phase phase = Phase::kTraining;
  PlanPolicy policy;
  Follows follows = Follows::kNothing;
  std::vector<PlanStep> steps;
  /// With a pass that follows: the prefetch + 1 units it begins with are there, or on their way,
  /// when this one is over. `closing` are those of them that are gathered after the last use.
  std::vector<int> opening, closing;

  /// `uses` is the model's order; `unit_count` bounds the unit indices.
  static UsagePlan make(Phase phase, const std::vector<UnitUse>& uses, int unit_count,
                        PlanPolicy policy, Follows follows = Follows::kNothing);

  /// Most bytes of gathered units alive at any moment, and gathers issued, by walking the plan from
  /// an empty state (resident, and with `keep`: from everything gathered once).
  int64_t peak_gathered(const std::vector<UnitLayout>& units) const;
  int gathers() const;
  /// A table for people: one line a use.
  std::string table(const std::vector<UnitLayout>& units) const;
};

}  // namespace rowshard
