// Executes a usage plan: gathers units ahead on the communication stream, hands them to the model
// when their use comes, and reshards them after their last reader has been queued.
//
// Protocol, on every rank in the same order:
//   begin(plan);
//   for each use of the plan, in its order:  acquire(unit, pass) … queue work … release(unit, pass)
//   finish();
// A use out of order is a LogicError before any collective is issued. After an exception in
// between, `abort` brings every unit back to its shard.
//
// A plan that another pass follows ends with the units that one begins with gathered or on their
// way, so that its first gathers run beside what the caller does in between; the next `begin`
// reshards what its plan does not use, and `drop_left` all of it. Trainable weights must not change
// in between, and a step that is being recorded as a graph leaves nothing for the next one.
//
// Streams: a gather writes memory that earlier work may have left, be it a unit's or scratch, so
// the communication stream waits for the compute stream's work up to the last release before each
// gather. Nothing else orders the two, and the host waits for neither (on the host device, work
// runs when issued).
//
// A plan of the inference phase drops the columnwise copies that can be made again when it begins.
#pragma once

#include <utility>
#include <vector>

#include "shard/sharded_unit.h"
#include "shard/usage_plan.h"

namespace rowshard {

class UsageScheduler {
 public:
  /// `units` outlive the scheduler. `compute` is the stream the model queues its work on.
  UsageScheduler(std::vector<ShardedUnit*> units, Stream& compute);
  ~UsageScheduler() { abort(); }
  UsageScheduler(const UsageScheduler&) = delete;
  UsageScheduler& operator=(const UsageScheduler&) = delete;

  void begin(const UsagePlan& plan);
  ShardedUnit& acquire(int unit, Pass pass);
  void release(int unit, Pass pass);
  /// The plan must have been executed to its end. Gathers what the next pass begins with.
  void finish();
  /// What the last plan left for a pass that will not come goes back to its shard.
  void drop_left();
  /// Drops the plan and brings every unit that is not resident back to its shard. Never throws a
  /// second error over the first.
  void abort() noexcept;

  /// Seconds the compute stream stood waiting for gathers since the last reset; waits for the last
  /// of them. Timed on the stream, on both devices.
  double exposed_seconds() const;
  void reset_exposed() { waits_used_ = 0; }

 private:
  void gather(int unit);
  void gather_unless_there(int unit);
  void wait_for_gather(int unit);
  const PlanStep& expect(int unit, Pass pass, const char* call) const;

  std::vector<ShardedUnit*> units_;
  Stream& compute_;
  Stream communication_;
  Event released_;
  const UsagePlan* plan_ = nullptr;
  size_t position_ = 0;
  bool in_use_ = false;
  std::vector<bool> left_;                      // by unit: for the pass that follows
  std::vector<std::pair<Event, Event>> waits_;  // begin and end of each wait; used again every step
  size_t waits_used_ = 0;
  TraceSpan span_;  // of the unit in use
};

}  // namespace rowshard
