#include "layers/linear_plan.h"

namespace rowshard {

const char* to_string(BackwardOverride value) {
  switch (value) {
    case BackwardOverride::kNone:
      return "none";
    case BackwardOverride::kHighPrecision:
      return "high_precision";
    case BackwardOverride::kDequantized:
      return "dequantized";
  }
  return "?";
}

const char* to_string(DgradSource source) {
  switch (source) {
    case DgradSource::kNone:
      return "none";
    case DgradSource::kPlain:
      return "plain";
    case DgradSource::kColumnwise:
      return "columnwise";
    case DgradSource::kRebuild:
      return "rebuild";
    case DgradSource::kDirect:
      return "direct";
    case DgradSource::kAuto:
      return "auto";
  }
  return "?";
}

LinearPlan plan_linear(const LinearFacts& facts) {
  const bool fp8_backward = facts.fp8 && facts.backward_override == BackwardOverride::kNone;
  const bool wgrad = facts.backward && facts.wgrad;
  // What wgrad reads of x: one of these.
  const bool wgrad_columnwise = wgrad && fp8_backward;
  const bool wgrad_rowwise =
      wgrad && facts.fp8 && facts.backward_override == BackwardOverride::kDequantized;
  const bool wgrad_plain = wgrad && !wgrad_columnwise && !wgrad_rowwise;

  LinearPlan plan;
  plan.x8.rowwise = facts.fp8;
  plan.reads_x = facts.adapter || !facts.fp8;
  const Usage wgrad_x8{wgrad_rowwise, wgrad_columnwise};
  const bool backward_reads_x = facts.backward && (facts.adapter || wgrad_plain);
  if (facts.input_again) {
    plan.x_again = backward_reads_x || wgrad;
    plan.x8_again = wgrad_x8;
  } else {
    plan.x8.columnwise = wgrad_columnwise;  // with the rowwise copy, by one kernel
    plan.saves_x8 = wgrad_x8;
    plan.saves_x = backward_reads_x;
  }
  if (!facts.backward)
    return plan;

  plan.dy8 = {fp8_backward && facts.dgrad, wgrad_columnwise};
  const bool frozen = !facts.wgrad;
  if (!facts.dgrad)
    return plan;
  if (!fp8_backward) {
    plan.dgrad = DgradSource::kPlain;
  } else if (frozen && facts.direct && facts.policy == ColumnwisePolicy::kDirect) {
    plan.dgrad = DgradSource::kDirect;
  } else if (frozen && facts.direct && facts.policy == ColumnwisePolicy::kAuto &&
             !facts.has_columnwise) {
    plan.dgrad = DgradSource::kAuto;
  } else {
    plan.dgrad = facts.has_columnwise ? DgradSource::kColumnwise : DgradSource::kRebuild;
  }
  // Frozen is a question to this backward. A copy that a graph reads, or that was there before a
  // recording began, is not freed: at a replay no host code runs that could make it again.
  const bool recorded = facts.pinned || (facts.capturing && facts.has_columnwise);
  plan.release = facts.fp8 && frozen && facts.policy != ColumnwisePolicy::kResident &&
                 facts.rebuildable && !recorded;
  plan.pin = facts.capturing && plan.dgrad == DgradSource::kColumnwise;
  return plan;
}

std::string to_string(const LinearPlan& plan) {
  return message("forward: x8 ", to_string(plan.x8), plan.reads_x ? ", reads x" : "", ", saves ",
                 plan.saves_x ? "x and " : "", to_string(plan.saves_x8),
                 "; backward: ", plan.x_again ? "x again, its " : "", to_string(plan.x8_again),
                 ", dy8 ", to_string(plan.dy8), ", dgrad from ", to_string(plan.dgrad),
                 plan.release ? ", then release" : "", plan.pin ? ", pinned" : "");
}

}  // namespace rowshard
