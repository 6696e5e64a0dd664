#include "layers/stack_bench.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "test_device.h"

namespace rowshard {
namespace {

// Small, but otherwise as the command runs it.
TEST(StackBench, DifferencesAreTheColumnwiseCopiesAndNothingElse) {
  StackBenchOptions options{.layers = 3, .features = 256, .tokens = 512, .repeats = 1, .steps = 1};
  for (const bool graph : {false, true}) {
    if (graph && !testing::test_device.is_cuda())
      break;
    options.graph = graph;
    const StackBenchResult result = bench_stack(options, testing::test_device);
    ASSERT_EQ(result.differences.size(), 2u);
    const int64_t codes = 3 * 256 * 256, scales = 3 * 2 * 4 * 4;
    for (const StackDifference& d : result.differences) {
      EXPECT_EQ(d.codes, codes);
      EXPECT_EQ(d.steady, codes + scales);
      EXPECT_EQ(d.peak, codes + scales);
    }
    for (const StackMeasurement& s : result.stacks) {
      const bool release = s.policy == ColumnwisePolicy::kRelease;
      EXPECT_EQ(s.columnwise.steady, release ? 0 : codes);
      EXPECT_EQ(s.columnwise.peak, release ? 256 * 256 : codes);
    }
  }
}

TEST(StackBench, RefusesWhatCannotRun) {
  EXPECT_THROW(check(StackBenchOptions{.features = 100}), ConfigError);
  EXPECT_THROW(check(StackBenchOptions{.layers = 0}), ConfigError);
  EXPECT_THROW(bench_stack(StackBenchOptions{.graph = true}, kHost), ConfigError);
}

}  // namespace
}  // namespace rowshard
