// Resumable checkpoints as files: what is written comes back, what is not one is refused by name.
#include "finetune/run_checkpoint.h"

#include <gtest/gtest.h>

#include <fstream>

#include "unit/model/file_fixture.h"

namespace rowshard {
namespace {

using testing::config_error;
using testing::TemporaryDirectory;

RunState some_state(int64_t trainable) {
  RunState state;
  for (int64_t i = 0; i < trainable; ++i) {
    state.parameters.push_back(0.25f * static_cast<float>(i) - 3);
    state.m.push_back(std::ldexp(1.0f, static_cast<int>(-i)));
    state.v.push_back(static_cast<float>(i * i));
  }
  state.step = 1234567890123;
  state.position = {3, 17};
  state.seed = 0xfedcba9876543210;  // above what a signed number holds
  return state;
}

TEST(RunCheckpoint, ComesBackBitForBit) {
  const TemporaryDirectory directory;
  const RunState written = some_state(77);
  write_run_state(directory / "checkpoint-5", written);
  const RunState read = read_run_state(directory / "checkpoint-5", 77);
  EXPECT_EQ(read.parameters, written.parameters);
  EXPECT_EQ(read.m, written.m);
  EXPECT_EQ(read.v, written.v);
  EXPECT_EQ(read.step, written.step);
  EXPECT_EQ(read.position, written.position);
  EXPECT_EQ(read.seed, written.seed);
  EXPECT_EQ(testing::list(directory.path()), std::vector<std::string>{"checkpoint-5"})
      << "no temporary name is left";
}

TEST(RunCheckpoint, OverwritesAsAWhole) {
  const TemporaryDirectory directory;
  write_run_state(directory / "c", some_state(5));
  RunState other = some_state(9);
  other.step = 2;
  write_run_state(directory / "c", other);
  EXPECT_EQ(read_run_state(directory / "c", 9).step, 2);
  EXPECT_EQ(testing::list(directory / "c"), std::vector<std::string>{"state.safetensors"});
}

TEST(RunCheckpoint, WhatIsNoCheckpointOfThisRunIsRefused) {
  const TemporaryDirectory directory;
  EXPECT_MENTIONS(config_error([&] { read_run_state(directory / "absent", 5); }), "absent");
  std::filesystem::create_directories(directory / "empty");
  EXPECT_MENTIONS(config_error([&] { read_run_state(directory / "empty", 5); }),
                  "state.safetensors");
  write_run_state(directory / "c", some_state(5));
  const std::string other = config_error([&] { read_run_state(directory / "c", 6); });
  EXPECT_MENTIONS(other, "holds 5 parameters, this run has 6");
  EXPECT_MENTIONS(other, "--lora-r");
  const std::filesystem::path file = directory / "c" / "state.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  EXPECT_MENTIONS(config_error([&] { read_run_state(directory / "c", 5); }), file.string());
  testing::write_tensors(file, {testing::named("parameters", "F32", {1}, std::vector<float>{1}),
                                testing::named("m", "F32", {1}, std::vector<float>{1}),
                                testing::named("v", "F32", {1}, std::vector<float>{1})});
  EXPECT_MENTIONS(config_error([&] { read_run_state(directory / "c", 1); }), "step");
}

TEST(RunCheckpoint, WhichOneToResume) {
  const TemporaryDirectory directory;
  const auto output = directory.path();
  EXPECT_EQ(checkpoint_to_resume("none", output), std::nullopt);
  EXPECT_EQ(checkpoint_to_resume("auto", output), std::nullopt);
  EXPECT_EQ(checkpoint_to_resume("auto", output / "absent"), std::nullopt);
  // By number, not by name; what only looks like one does not count.
  for (const char* name : {"checkpoint-9", "checkpoint-10", "checkpoint-11x", "checkpoint-",
                           "other-99", ".checkpoint-50.tmp-1"}) {
    std::filesystem::create_directories(output / name);
  }
  testing::write_bytes(output / "checkpoint-200", "a file");
  EXPECT_EQ(checkpoint_to_resume("auto", output), output / "checkpoint-10");
  EXPECT_EQ(checkpoint_to_resume("none", output), std::nullopt);
  EXPECT_EQ(checkpoint_to_resume("/some/where", output), std::filesystem::path("/some/where"));
}

TEST(RunCheckpoint, KeepsTheNewestByNumber) {
  const TemporaryDirectory directory;
  for (int step : {2, 9, 10, 100})
    write_run_state(directory / message("checkpoint-", step), some_state(3));
  std::filesystem::create_directories(directory / "adapter");
  keep_newest_checkpoints(directory.path(), 2);
  EXPECT_EQ(testing::list(directory.path()),
            (std::vector<std::string>{"adapter", "checkpoint-10", "checkpoint-100"}));
  keep_newest_checkpoints(directory.path(), 5);
  EXPECT_EQ(testing::list(directory.path()).size(), 3u);
}

}  // namespace
}  // namespace rowshard
