#include "fp8/bench.h"

#include <gtest/gtest.h>

#include <set>

#include "fp8_test_data.h"

namespace rowshard {
namespace {

BenchOptions small() {
  BenchOptions options;
  options.repeats = 3;
  options.launches = 2;
  options.rotate_bytes = 1 << 18;
  options.copy_bytes = 1 << 16;
  options.kernel_shapes = {{128, 384}};
  options.gemm_tokens = {64};
  return options;
}

TEST(Fp8Bench, KernelFiguresFitTogether) {
  testing::Bench bench;
  const auto results = bench_fp8_kernels(small(), bench.ctx);
  ASSERT_EQ(results.size(), 1u + 4 * 4 + 2);  // the copy; four kernels a grouping; two rebuilds
  EXPECT_EQ(results[0].name, "device copy");
  std::set<std::string> names;
  for (const auto& r : results) {
    names.insert(r.name);
    EXPECT_GT(r.fastest_us, 0) << r.name;
    EXPECT_GE(r.median_us, r.fastest_us) << r.name;
    EXPECT_DOUBLE_EQ(r.gb_per_s, static_cast<double>(r.bytes) / r.median_us * 1e-3) << r.name;
    EXPECT_DOUBLE_EQ(r.of_copy, r.gb_per_s / r.copy_gb_per_s) << r.name;
  }
  EXPECT_EQ(names.size(), results.size()) << "two measurements share a name";
  // 128 × 384 bf16 read, codes and three scales (padded to four) written.
  const auto row = std::find_if(results.begin(), results.end(), [](const auto& r) {
    return r.name == "quantize 128x128 from bf16, rowwise";
  });
  ASSERT_NE(row, results.end());
  EXPECT_EQ(row->bytes, 128 * 384 * 3 + 4 * 4);
  EXPECT_EQ(bench.arena.total().now, 0) << "operands were kept";
}

TEST(Fp8Bench, GemmFiguresFitTogether) {
  testing::Bench bench;
  const auto results = bench_fp8_gemm(small(), {{"toy", 256, 128}}, bench.ctx);
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0].product, "fprop");
  EXPECT_EQ(results[0].n, 256);
  EXPECT_EQ(results[1].n, 128);
  EXPECT_EQ(results[1].k, 256);
  for (const auto& r : results) {
    EXPECT_GT(r.host_us, 0);
    EXPECT_DOUBLE_EQ(r.tflop_per_s, 2.0 * 64 * 256 * 128 / r.median_us * 1e-6);
    EXPECT_EQ(r.best_algorithm_us > 0, testing::test_device.is_cuda());
    EXPECT_EQ(r.bare_host_us > 0, testing::test_device.is_cuda());
  }
  EXPECT_EQ(llama_gemm_shapes().size(), 10u);
}

}  // namespace
}  // namespace rowshard
