#include "comm/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>

#include "core/device.h"
#include "unit/comm/scoped_environment.h"

namespace rowshard {
namespace {

using testing::ScopedEnvironment;

void wait_until_failed(const Watchdog& watchdog) {
  const Deadline deadline(5);
  Backoff backoff;
  while (!watchdog.failed() && !deadline.passed())
    backoff.pause();
}

TEST(Watchdog, TimeoutVariable) {
  {
    const ScopedEnvironment env({});
    EXPECT_EQ(comm_timeout_seconds(), 300);
  }
  {
    const ScopedEnvironment env("ROWSHARD_COMM_TIMEOUT", "2.5");
    EXPECT_EQ(comm_timeout_seconds(), 2.5);
  }
  for (const char* wrong : {"0", "-1", "soon", "3s", "inf"}) {
    const ScopedEnvironment env("ROWSHARD_COMM_TIMEOUT", wrong);
    EXPECT_THROW(comm_timeout_seconds(), ConfigError) << wrong;
  }
}

TEST(Watchdog, WorkThatFinishesIsForgotten) {
  Watchdog watchdog(0.3);
  std::atomic<bool> done = false;
  watchdog.watch([] { return std::string("late"); }, [&] { return done.load(); });
  done = true;
  watchdog.drain();
  EXPECT_FALSE(watchdog.failed());
  EXPECT_NO_THROW(watchdog.check());
}

TEST(Watchdog, LateWorkAbortsOnceAndIsExplained) {
  Watchdog watchdog(0.1);
  std::atomic<int> aborted = 0;
  watchdog.add_abort([&] { ++aborted; });
  watchdog.set_explain([] { return std::string("; rank 1 did not answer"); });
  const double begin = now_seconds();
  watchdog.watch([] { return std::string("rank 0: all_gather #17"); }, [] { return false; });
  watchdog.watch([] { return std::string("another"); }, [] { return false; });
  wait_until_failed(watchdog);
  EXPECT_LT(now_seconds() - begin, 2);
  EXPECT_EQ(aborted, 1);
  watchdog.drain();  // nothing to wait for after a failure
  for (int again = 0; again < 2; ++again) {
    try {
      watchdog.check();
      FAIL() << "a failed job went on";
    } catch (const CommTimeout& error) {
      EXPECT_STREQ(error.what(), "rank 0: all_gather #17; rank 1 did not answer");
    }
  }
}

TEST(Watchdog, ProbeFailsTheJobAndARemovedOneDoesNot) {
  Watchdog watchdog(60);
  const int harmless = watchdog.add_probe([] { return std::nullopt; });
  watchdog.remove(harmless);
  std::atomic<int> aborted = 0;
  watchdog.remove(watchdog.add_abort([&] { aborted += 100; }));
  watchdog.add_abort([&] { ++aborted; });
  watchdog.add_probe([] { return std::optional<std::string>("rank 1 closed its connection"); });
  wait_until_failed(watchdog);
  EXPECT_EQ(aborted, 1);
  EXPECT_THROW(watchdog.check(), CommError);
}

TEST(Watchdog, ThrowingCallbackIsAFailureNotACrash) {
  Watchdog watchdog(60);
  watchdog.watch([] { return std::string("x"); },
                 []() -> bool { throw DeviceError("event query failed"); });
  wait_until_failed(watchdog);
  EXPECT_THROW(watchdog.check(), CommError);
}

}  // namespace
}  // namespace rowshard
