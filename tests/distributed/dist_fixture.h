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
#include "core/arena.h"

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

/// Arena (poisoned) and stream on this rank's device, with upload and download for tests.
struct DistBench {
  Arena arena{test_world->device()};
  Stream stream{test_world->device()};
  Context ctx{arena, stream};

  DistBench() { arena.set_poison(true); }

  template <typename T>
  Tensor upload(const std::vector<T>& values, Shape shape,
                Category category = Category::kActivations) {
    Tensor tensor = arena.tensor(category, "test", DTypeOf<T>::value, shape);
    copy(tensor, ConstView(values.data(), DTypeOf<T>::value, shape, kHost), stream);
    stream.synchronize();
    return tensor;
  }
  /// The bytes as they lie, as elements of T.
  template <typename T>
  std::vector<T> download(const ConstView& view) {
    std::vector<T> values(view.bytes() / sizeof(T));
    copy(View(values.data(), view.dtype, view.shape, kHost), view, stream);
    stream.synchronize();
    return values;
  }
};

}  // namespace rowshard::testing
