// The timeline: what is recorded while one is active, in Chrome's format.
#include "core/trace.h"

#include <gtest/gtest.h>

#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1))
    ++found;
  return found;
}

TEST(Trace, HoldsTheSpansThatEndedWhileItWasActive) {
  Bench bench;
  { const TraceSpan span(bench.stream, TraceLane::kCompute, "before"); }
  TraceSpan late;
  std::string json;
  {
    Trace trace(bench.stream);
    EXPECT_EQ(Trace::active(), &trace);
    EXPECT_THROW(Trace{bench.stream}, LogicError) << "one at a time";
    {
      const TraceSpan outer(bench.stream, TraceLane::kUnits, "block 3 \"forward\"");
      TraceSpan inner(bench.stream, TraceLane::kGathers, "block 4", 4096);
      inner.end();
      inner.end();  // once is enough
    }
    late = TraceSpan(bench.stream, TraceLane::kReductions, "never ended");
    json = trace.json(5);
    EXPECT_EQ(trace.spans(), 3);
  }
  late.end();  // its trace is gone
  { const TraceSpan span(bench.stream, TraceLane::kCompute, "after"); }
  EXPECT_EQ(count(json, "\"ph\":\"X\""), 2) << json;
  EXPECT_EQ(count(json, "block 3 \\\"forward\\\""), 1) << json;
  EXPECT_EQ(count(json, "\"args\":{\"bytes\":4096}"), 1) << json;
  EXPECT_EQ(count(json, "\"pid\":5"), 7) << json;
  EXPECT_EQ(count(json, "before") + count(json, "after") + count(json, "never"), 0) << json;
  EXPECT_EQ(count(json, "\"dur\":-"), 0) << json;
  EXPECT_EQ(Trace::active(), nullptr);
}

}  // namespace
}  // namespace rowshard
