// A timeline of what a rank did: gathers, rebuilds, GEMMs, reductions, in Chrome's trace format
// (chrome://tracing, Perfetto).
//
// At most one Trace is active in a process; while none is, a span costs one comparison. cuda spans
// are between two events on their stream, so they show when the device worked; host spans are
// between two readings of the clock. Nothing is waited for until `json`. One host thread.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "core/device.h"

namespace rowshard {

/// The lanes of the picture.
enum class TraceLane { kUnits, kCompute, kGathers, kReductions };
const char* to_string(TraceLane lane);

class Trace {
 public:
  /// Active until it is destroyed; LogicError when another one is. Times count from here.
  explicit Trace(Stream& stream);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  static Trace* active();

  int64_t spans() const { return static_cast<int64_t>(spans_.size()); }
  /// Waits for the last span. `rank` is the process of the picture.
  std::string json(int rank) const;

 private:
  friend class TraceSpan;
  struct Mark {
    std::optional<Event> event;  // cuda
    double seconds = 0;          // host
  };
  struct Span {
    TraceLane lane;
    std::string name;
    int64_t bytes;  // 0: not said
    Mark begin, end;
    bool ended = false;
  };
  static Mark mark(Stream& stream);
  double microseconds(const Mark& mark) const;

  Mark origin_;
  std::deque<Span> spans_;  // a span's address stays
};

/// From construction to `end` or destruction, if a Trace is active.
class TraceSpan {
 public:
  TraceSpan() = default;
  TraceSpan(Stream& stream, TraceLane lane, const std::string& name, int64_t bytes = 0);
  ~TraceSpan() { end(); }
  TraceSpan(TraceSpan&& other) noexcept;
  TraceSpan& operator=(TraceSpan&& other) noexcept;
  void end();

 private:
  Trace* trace_ = nullptr;
  Trace::Span* span_ = nullptr;
  Stream* stream_ = nullptr;
};

}  // namespace rowshard
