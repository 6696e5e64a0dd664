// How long a stream stood waiting for others' work: the part of communication that nothing hid.
//
// Each wait lies between two marks on the waiting stream itself, because on cuda the host is long
// gone. The marks are kept and used again. Not thread-safe.
#pragma once

#include <utility>
#include <vector>

#include "core/device.h"

namespace rowshard {

class WaitClock {
 public:
  /// stream.wait(event), timed.
  void wait(Stream& stream, const Event& event);
  /// Since the last reset; waits for the last of the waits.
  double seconds() const;
  void reset() { used_ = 0; }

 private:
  std::vector<std::pair<Event, Event>> marks_;
  size_t used_ = 0;
};

}  // namespace rowshard
