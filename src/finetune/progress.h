// A one-line progress bar. Whether there is a terminal, and on which rank, is the caller's
// business: it hands over the stream to draw on and the width of a line.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

namespace rowshard {

struct ProgressState {
  int64_t step = 0;
  int64_t max_steps = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double seconds_per_step = 0;  // 0: not known yet, no time left is shown
};

/// "step 12/300 [##------] loss 1.234 3.1k tok/s 2m05s left", at most `width` characters.
std::string progress_line(const ProgressState& state, int width);

class ProgressBar {
 public:
  /// Borrows `out`, a terminal.
  ProgressBar(std::ostream& out, int width) : out_(out), width_(width) {}
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void draw(const ProgressState& state);
  /// Removes the bar, so that a whole line can be printed; the next draw brings it back.
  void clear();

 private:
  std::ostream& out_;
  int width_;
  bool drawn_ = false;
};

}  // namespace rowshard
