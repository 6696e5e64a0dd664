#include "comm/wait_clock.h"

namespace rowshard {

void WaitClock::wait(Stream& stream, const Event& event) {
  if (stream.capturing()) {  // marks of a captured graph cannot be read
    stream.wait(event);
    return;
  }
  if (used_ == marks_.size())
    marks_.emplace_back(Event(stream.device(), true), Event(stream.device(), true));
  auto& [begin, end] = marks_[used_++];
  begin.record(stream);
  stream.wait(begin);  // on the host the mark takes over what was pending; nothing may be lost
  stream.wait(event);
  end.record(stream);
}

double WaitClock::seconds() const {
  double ms = 0;
  for (size_t i = 0; i < used_; ++i)
    ms += elapsed_ms(marks_[i].first, marks_[i].second);
  return ms * 1e-3;
}

}  // namespace rowshard
