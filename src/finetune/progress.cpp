#include "finetune/progress.h"

#include <algorithm>
#include <cstdio>

#include "core/error.h"

namespace rowshard {

namespace {

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[64];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

std::string rate(double tokens_per_second) {
  if (tokens_per_second >= 1e6)
    return format("%.2fM tok/s", tokens_per_second / 1e6);
  if (tokens_per_second >= 1e3)
    return format("%.1fk tok/s", tokens_per_second / 1e3);
  return format("%.0f tok/s", tokens_per_second);
}

std::string duration(double seconds) {
  const auto s = static_cast<long long>(std::clamp(seconds, 0.0, 1e12));
  if (s >= 3600)
    return format("%lldh%02lldm", s / 3600, s / 60 % 60);
  if (s >= 60)
    return format("%lldm%02llds", s / 60, s % 60);
  return format("%llds", s);
}

}  // namespace

std::string progress_line(const ProgressState& state, int width) {
  const int64_t total = std::max<int64_t>(state.max_steps, 1);
  const int64_t step = std::clamp<int64_t>(state.step, 0, total);
  const std::string head = message("step ", step, "/", total, " ");
  std::string tail = format(" loss %.4f ", state.loss) + rate(state.tokens_per_second);
  if (state.seconds_per_step > 0) {
    tail +=
        message(" ", duration(state.seconds_per_step * static_cast<double>(total - step)), " left");
  }
  // The bar takes what the words leave, and goes first when they leave too little.
  const int room = width - static_cast<int>(head.size() + tail.size()) - 2;
  std::string bar;
  if (room >= 4) {
    const int cells = std::min(room, 40);
    const int full = static_cast<int>(step * cells / total);
    bar = message("[", std::string(full, '#'), std::string(cells - full, '-'), "]");
  }
  return (head + bar + tail).substr(0, static_cast<size_t>(std::max(width, 0)));
}

void ProgressBar::draw(const ProgressState& state) {
  // One column stays free: a full line makes some terminals wrap. \033[K clears what was longer.
  out_ << '\r' << progress_line(state, width_ - 1) << "\033[K" << std::flush;
  drawn_ = true;
}

void ProgressBar::clear() {
  if (drawn_)
    out_ << "\r\033[K" << std::flush;
  drawn_ = false;
}

}  // namespace rowshard
