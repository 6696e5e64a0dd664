#include "finetune/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace rowshard {
namespace {

namespace fs = std::filesystem;

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    directory_ =
        fs::temp_directory_path() / message("rowshard_metrics_", info->name(), "_", ::getpid());
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }

  fs::path path() const { return directory_ / "metrics.jsonl"; }
  std::vector<std::string> lines() const {
    std::ifstream in(path());
    std::vector<std::string> result;
    for (std::string line; std::getline(in, line);)
      result.push_back(line);
    return result;
  }
  void write_steps(MetricsWriter& writer, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      writer.write({.step = step, .loss = 1.0 / static_cast<double>(step)}, arena_);
    }
  }

  fs::path directory_;
  Arena arena_{kHost};
};

TEST_F(MetricsTest, EveryFieldWithAllItsBits) {
  const double loss = std::nextafter(2.0 / 3, 1.0);
  Buffer held = arena_.allocate(Category::kAdapter, "held", 4096);
  arena_.allocate(Category::kWorkspace, "gone", 1000).reset();
  MetricsWriter writer(path());
  writer.write({.step = 3,
                .loss = loss,
                .grad_norm = 1e-30,
                .lr = 2e-4,
                .tokens = 12345,
                .tokens_per_second = 1234.5678901234567,
                .step_ms = 1.5,
                .exposed_comm_ms = 0.25,
                .wire_bytes = int64_t{1} << 40},
               arena_);
  writer.write(EvalMetrics{.step = 3, .eval_loss = loss * 2, .eval_tokens = 77});
  const auto written = lines();  // while the writer is alive: each line is flushed
  ASSERT_EQ(written.size(), 2u);
  const auto step = nlohmann::json::parse(written[0]);
  EXPECT_EQ(step.size(), 10u);
  EXPECT_EQ(step["step"], 3);
  EXPECT_EQ(std::bit_cast<uint64_t>(step["loss"].get<double>()), std::bit_cast<uint64_t>(loss));
  EXPECT_EQ(step["grad_norm"].get<double>(), 1e-30);
  EXPECT_EQ(step["lr"].get<double>(), 2e-4);
  EXPECT_EQ(step["tokens"], 12345);
  EXPECT_EQ(step["tokens_per_second"].get<double>(), 1234.5678901234567);
  EXPECT_EQ(step["step_ms"].get<double>(), 1.5);
  EXPECT_EQ(step["exposed_comm_ms"].get<double>(), 0.25);
  EXPECT_EQ(step["wire_bytes"].get<int64_t>(), int64_t{1} << 40);
  EXPECT_EQ(step["memory"].size(), static_cast<size_t>(kCategoryCount) + 1);
  EXPECT_EQ(step["memory"]["adapter"], 4096);
  EXPECT_EQ(step["memory"]["workspace"], 0);
  EXPECT_EQ(step["memory"]["peak"], 5096);
  const auto eval = nlohmann::json::parse(written[1]);
  EXPECT_EQ(eval["step"], 3);
  EXPECT_EQ(eval["eval_loss"].get<double>(), loss * 2);
  EXPECT_EQ(eval["eval_tokens"], 77);
}

TEST_F(MetricsTest, NotFiniteIsNull) {
  MetricsWriter writer(path());
  writer.write({.step = 1, .loss = std::numeric_limits<double>::quiet_NaN()}, arena_);
  EXPECT_TRUE(nlohmann::json::parse(lines()[0])["loss"].is_null());
}

TEST_F(MetricsTest, ANewRunStartsTheFileAnew) {
  {
    MetricsWriter writer(path());
    write_steps(writer, 1, 3);
  }
  MetricsWriter writer(path());
  EXPECT_TRUE(lines().empty());
}

TEST_F(MetricsTest, ResumeDropsWhatCameAfterTheCheckpoint) {
  {
    MetricsWriter writer(path());
    write_steps(writer, 1, 4);
    writer.write(EvalMetrics{.step = 4, .eval_loss = 1});
    write_steps(writer, 5, 6);
  }
  std::ofstream(path(), std::ios::app) << "{\"step\":7,\"lo";  // killed while writing
  const auto before = lines();
  MetricsWriter writer(path(), 4);
  write_steps(writer, 5, 5);
  const auto after = lines();
  ASSERT_EQ(after.size(), 6u);
  for (size_t i = 0; i < 6; ++i)
    EXPECT_EQ(after[i], before[i]);
  // Resumed at the step of the torn line itself.
  std::ofstream(path(), std::ios::app) << "{\"step\":6,\"lo";
  MetricsWriter again(path(), 9);
  EXPECT_EQ(lines().size(), 6u);
}

TEST_F(MetricsTest, RefusesAFileThatIsNoMetrics) {
  std::ofstream(path()) << "hello\n{\"step\":1}\n";
  EXPECT_THROW(MetricsWriter(path(), 1), ConfigError);
  EXPECT_EQ(lines().size(), 2u) << "the file is left as it was";
}

TEST_F(MetricsTest, NamesThePathItCannotWrite) {
  try {
    MetricsWriter writer(directory_ / "missing" / "metrics.jsonl");
    FAIL() << "wrote into a directory that is not there";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("missing/metrics.jsonl"), std::string::npos);
  }
}

}  // namespace
}  // namespace rowshard
