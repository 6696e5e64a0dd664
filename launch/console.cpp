#include "console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>

namespace rowshard {

namespace {

constexpr int64_t kLinesPerRun = 20;

int terminal_width() {
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

}  // namespace

Console::Console(bool speaks) : speaks_(speaks) {
  if (speaks_ && isatty(STDERR_FILENO))
    bar_.emplace(std::cerr, terminal_width());
}

void Console::line(const std::string& text) {
  if (!speaks_)
    return;
  if (bar_)
    bar_->clear();
  std::cout << text << std::endl;
}

void Console::step(const StepMetrics& metrics, const ProgressState& progress) {
  if (!speaks_)
    return;
  if (bar_)
    return bar_->draw(progress);
  const int64_t every = std::max<int64_t>(1, progress.max_steps / kLinesPerRun);
  if (metrics.step == 1 || metrics.step % every == 0 || metrics.step == progress.max_steps) {
    std::cout << progress_line(progress, 100) << std::endl;
  }
}

void Console::eval(const EvalMetrics& metrics) {
  char text[128];
  std::snprintf(text, sizeof(text), "eval after step %lld: loss %.4f, perplexity %.3f",
                static_cast<long long>(metrics.step), metrics.eval_loss,
                std::exp(metrics.eval_loss));
  line(text);
}

}  // namespace rowshard
