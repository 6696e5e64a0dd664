#include "finetune/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace rowshard {
namespace {

constexpr ProgressState kHalf{
    .step = 5, .max_steps = 10, .loss = 1.25, .tokens_per_second = 3140, .seconds_per_step = 25};

TEST(Progress, TheLineSaysHowFarAndHowLong) {
  const std::string line = progress_line(kHalf, 100);
  EXPECT_NE(line.find("step 5/10 ["), std::string::npos) << line;
  EXPECT_NE(line.find("####################--------------------]"), std::string::npos) << line;
  EXPECT_NE(line.find("loss 1.2500 3.1k tok/s 2m05s left"), std::string::npos) << line;
}

TEST(Progress, NeverWiderThanTheTerminal) {
  for (int width = 0; width < 130; ++width) {
    for (int64_t step : {-1, 0, 5, 10, 11}) {
      ProgressState state = kHalf;
      state.step = step;
      EXPECT_LE(progress_line(state, width).size(), static_cast<size_t>(width));
    }
  }
}

TEST(Progress, OneLineRedrawnAndTakenAway) {
  std::ostringstream out;
  {
    ProgressBar bar(out, 60);
    bar.draw(kHalf);
    bar.draw(kHalf);
  }
  const std::string text = out.str();
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\r'), 3);
  EXPECT_EQ(text.substr(text.size() - 4), "\r\033[K");
}

TEST(Progress, NothingDrawnNothingCleared) {
  std::ostringstream out;
  { ProgressBar bar(out, 60); }
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace rowshard
