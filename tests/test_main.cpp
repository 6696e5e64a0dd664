// GoogleTest main for one-process tests: `--device host|cuda` picks where device tests run
// (default: host). Asked for cuda where there is none, it skips with exit code 77 and says why.
#include "test_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <iostream>

namespace rowshard::testing {
Device test_device = kHost;
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
      if (std::strcmp(argv[++i], "cuda") == 0) {
        if (rowshard::cuda_device_count() == 0) {
          std::cout << "SKIP: " << rowshard::cuda_unavailable_reason() << "\n";
          return 77;
        }
        rowshard::testing::test_device = {rowshard::DeviceKind::kCuda, 0};
        rowshard::set_device(rowshard::testing::test_device);
      }
    }
  }
  return RUN_ALL_TESTS();
}
