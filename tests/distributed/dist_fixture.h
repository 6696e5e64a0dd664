// What a multi-rank test sees: the world, a barrier after each test, and a timer.
//
//   class MyTest : public rowshard::testing::DistributedTest {};
//   TEST_F(MyTest, Name) { auto comm = world().communicator("gather"); … }
//
// Run by dist_main.cpp on any number of ranks: alone, under mpirun, or under torchrun's variables.
// A test runs on every rank; a failure on any rank fails the run on all.
#pragma once

#include <gtest/gtest.h>

#include "comm/world.h"
#include "test_device.h"

namespace rowshard::testing {

extern World* test_world;

class DistributedTest : public ::testing::Test {
 protected:
  static World& world() { return *test_world; }
  static int rank() { return test_world->rank(); }
  static int size() { return test_world->size(); }
  static Device device() { return test_world->device(); }

  void TearDown() override { world().barrier(); }
};

/// On this rank's device.
struct DistBench : Bench {
  DistBench() : Bench(test_world->device()) {}
};

}  // namespace rowshard::testing
