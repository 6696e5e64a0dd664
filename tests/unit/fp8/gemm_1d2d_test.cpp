#include "fp8/gemm_1d2d.h"

#include <gtest/gtest.h>

#include "cuda_graph.h"
#include "fp8/gemm.h"
#include "fp8/gemm_path.h"
#include "fp8_test_data.h"

namespace rowshard {
namespace {

using cuda::choose_gemm_1d2d_tile;
using cuda::kGemm1d2dTileCount;
using cuda::kGemm1d2dTiles;
using testing::Bench;
using testing::Fp8Tensor;
using testing::quantized;

/// The process' backend inside a scope.
struct Backend {
  GemmBackend before = gemm_backend();
  explicit Backend(GemmBackend backend) { set_gemm_backend(backend); }
  ~Backend() { set_gemm_backend(before); }
};

TEST(Gemm1d2dTile, FillsTheGpu) {
  const auto tile = [](int64_t m, int64_t n, int64_t k) {
    const cuda::TileShape shape = kGemm1d2dTiles[choose_gemm_1d2d_tile(m, n, k, 132)];
    return std::pair{shape.rows, shape.cols};
  };
  EXPECT_EQ(tile(4096, 4096, 4096), std::pair(256, 128));
  EXPECT_EQ(tile(16384, 8192, 8192), std::pair(256, 128));
  EXPECT_EQ(tile(4096, 576, 1536), std::pair(128, 192));
  EXPECT_EQ(tile(4096, 128, 4096), std::pair(64, 64));
  EXPECT_EQ(tile(8, 4096, 4096), std::pair(64, 64));
  for (const int64_t m : {1, 63, 300, 5000}) {
    for (const int64_t n : {16, 144, 30000}) {
      for (const int multiprocessors : {1, 20, 132}) {
        const int chosen = choose_gemm_1d2d_tile(m, n, 16, multiprocessors);
        EXPECT_TRUE(chosen >= 0 && chosen < kGemm1d2dTileCount);
      }
    }
  }
}

TEST(OwnGemm, TakesWhatItsHeaderSays) {
  const auto runs = [](DType y, Grouping x, Grouping w, DType codes, int64_t n, int64_t k) {
    const auto operand = [&](Grouping grouping, int64_t outer) {
      return ConstFp8View(ConstView(nullptr, codes, {outer, k}, kHost), {}, grouping);
    };
    return own_gemm_runs(y, operand(x, 8), operand(w, n));
  };
  using enum Grouping;
  EXPECT_TRUE(runs(DType::kBF16, k1x128, k128x128, DType::kE4M3, 144, 272));
  EXPECT_TRUE(runs(DType::kF32, k1x128, k128x128, DType::kE4M3, 16, 16));
  EXPECT_FALSE(runs(DType::kF16, k1x128, k128x128, DType::kE4M3, 144, 272));
  EXPECT_FALSE(runs(DType::kBF16, k1x128, k1x128, DType::kE4M3, 144, 272));
  EXPECT_FALSE(runs(DType::kBF16, k128x128, k1x128, DType::kE4M3, 144, 272));
  EXPECT_FALSE(runs(DType::kBF16, kMx1x32, kMx32x32, DType::kE4M3, 144, 272));
  EXPECT_FALSE(runs(DType::kBF16, k1x128, k128x128, DType::kE5M2, 144, 272));
  EXPECT_FALSE(runs(DType::kBF16, k1x128, k128x128, DType::kE4M3, 136, 272));
  EXPECT_FALSE(runs(DType::kBF16, k1x128, k128x128, DType::kE4M3, 144, 280));
}

TEST(OwnGemm, IsChosenByTheBackend) {
  const auto chosen = [](GemmBackend backend, int64_t m, int64_t n, int64_t k) {
    const auto operand = [&](Grouping grouping, int64_t outer) {
      return ConstFp8View(ConstView(nullptr, DType::kE4M3, {outer, k}, kHost), {}, grouping);
    };
    return own_gemm_chosen(backend, DType::kBF16, operand(Grouping::k1x128, m),
                           operand(Grouping::k128x128, n));
  };
  EXPECT_FALSE(chosen(GemmBackend::kCublasLt, 4096, 4096, 4096));
  EXPECT_TRUE(chosen(GemmBackend::kOwn, 512, 4096, 4096));
  EXPECT_TRUE(chosen(GemmBackend::kAuto, 4096, 4096, 4096));
  EXPECT_TRUE(chosen(GemmBackend::kAuto, 4096, 576, 1536));
  EXPECT_TRUE(chosen(GemmBackend::kAuto, 512, 4096, 4096));
  EXPECT_FALSE(chosen(GemmBackend::kAuto, 300, 1024, 28672));  // measured: cuBLASLt by 38 %
  EXPECT_FALSE(chosen(GemmBackend::kOwn, 512, 4100, 4096));
}

// On the host there is one product; on cuda ours and cuBLASLt's must not differ in a bit.
TEST(OwnGemm, EqualsCublasLtBitForBit) {
  const Shape shapes[] = {{1, 128, 512},  {7, 576, 192},  {64, 192, 1536},
                          {65, 336, 704}, {129, 144, 16}, {300, 1024, 528}};
  for (const Shape& s : shapes) {
    const int64_t m = s[0], n = s[1], k = s[2];
    for (const bool power_of_two : {true, false}) {
      Bench bench;
      const Fp8Tensor x = quantized(bench, Grouping::k1x128, m, k, 1, power_of_two);
      const Fp8Tensor w = quantized(bench, Grouping::k128x128, n, k, 2, power_of_two);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const auto& [beta, biased] : {std::pair{0.0f, false}, {0.0f, true}, {1.0f, false}}) {
          std::vector<float> bias_values = testing::many_scales(1, n, 3);
          const Tensor bias = upload_as(bench, bias_values, DType::kBF16, {n});
          GemmOptions options{.beta = beta, .bias = std::nullopt};
          if (biased)
            options.bias = bias;
          const auto result = [&](GemmBackend backend, int multiprocessors) {
            const Backend scope(backend);
            set_gemm_multiprocessors(multiprocessors);
            std::vector<float> start = testing::many_scales(m, n, 4);
            const Tensor y = upload_as(bench, start, dtype, {m, n});
            fp8_gemm(y, x.view(), w.view(), options, bench.ctx);
            set_gemm_multiprocessors(0);
            return bench.download<uint8_t>(y);
          };
          const auto wanted = result(GemmBackend::kCublasLt, 0);
          for (const int multiprocessors : {0, 5}) {  // all, or some left to others
            EXPECT_EQ(testing::difference(result(GemmBackend::kOwn, multiprocessors), wanted),
                      "equal")
                << s << " " << to_string(dtype) << " beta " << beta << " bias " << biased
                << " multiprocessors " << multiprocessors;
          }
        }
      }
    }
  }
}

// Unlike cuBLASLt's, on either device (with one OpenBLAS thread): a row sums in one order whatever
// tile it falls in.
TEST(OwnGemm, RowsDoNotSeeEachOther) {
  if (testing::test_device.is_host())
    GTEST_SKIP() << "Gemm.RowsDoNotSeeEachOther is the host's";
  Bench bench;
  const Backend scope(GemmBackend::kOwn);
  const int64_t m = 300, n = 336, k = 704;
  const Fp8Tensor w = quantized(bench, Grouping::k128x128, n, k, 2, false);
  const auto rows = [&](int64_t count) {
    const Fp8Tensor x = quantized(bench, Grouping::k1x128, count, k, 1, false);
    const Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {count, n});
    fp8_gemm(y, x.view(), w.view(), {}, bench.ctx);
    return bench.download<float>(y);
  };
  const std::vector<float> whole = rows(m);
  for (const int64_t count : {1, 64, 130, 257}) {
    std::vector<float> part = whole;
    part.resize(count * n);
    EXPECT_TRUE(rows(count) == part) << count << " of " << m << " rows";
  }
}

TEST(OwnGemm, IsCaptured) {
  Bench bench;
  const Backend scope(GemmBackend::kOwn);
  const Fp8Tensor x = quantized(bench, Grouping::k1x128, 70, 256, 1, true);
  const Fp8Tensor w = quantized(bench, Grouping::k128x128, 144, 256, 2, true);
  const Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kBF16, {70, 144});
  fp8_gemm(y, x.view(), w.view(), {}, bench.ctx);
  const auto wanted = bench.download<uint8_t>(y);
  testing::Graph graph(bench.ctx, [&] { fp8_gemm(y, x.view(), w.view(), {}, bench.ctx); });
  fill_bytes(y, 0xff, bench.stream);
  graph.replay();
  EXPECT_EQ(testing::difference(bench.download<uint8_t>(y), wanted), "equal");
}

}  // namespace
}  // namespace rowshard
