// What this room queues, recorded in a CUDA graph and replayed with other bytes at the same
// addresses: the results must be the eager ones, and the device's skip flag must be read at replay.
#include <gtest/gtest.h>

#include "cuda_graph.h"
#include "fp8/gemm.h"
#include "fp8/quantize.h"
#include "fp8/rebuild.h"
#include "fp8_test_data.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::difference;
using testing::download;
using testing::Fp8Bytes;
using testing::Fp8Tensor;
using testing::Graph;
using testing::quantize_by_the_book;

constexpr DType kInputs[] = {DType::kF32, DType::kBF16, DType::kF16};

/// Writes values at the address of `to`, rounded to its dtype.
void write(Bench& bench, const Tensor& to, std::vector<float> values) {
  const Tensor fresh = upload_as(bench, values, to.dtype(), to.shape());
  copy(to, fresh, bench.stream);
  bench.stream.synchronize();
}

void write(Bench& bench, const Fp8Tensor& to, const Fp8Bytes& bytes) {
  copy(to.codes, ConstView(bytes.codes.data(), to.codes.dtype(), to.codes.shape(), kHost),
       bench.stream);
  copy(to.scales, ConstView(bytes.scales.data(), to.scales.dtype(), to.scales.shape(), kHost),
       bench.stream);
  bench.stream.synchronize();
}

/// The values as upload_as rounds them.
std::vector<float> rounded(std::vector<float> values, DType dtype) {
  for (float& value : values) {
    value = dtype == DType::kBF16  ? static_cast<float>(bf16(value))
            : dtype == DType::kF16 ? static_cast<float>(f16(value))
                                   : value;
  }
  return values;
}

class Capture : public ::testing::TestWithParam<Grouping> {};

TEST_P(Capture, QuantizersReadTheSkipFlagAtReplay) {
  const int64_t rows = 150, cols = 264;
  for (const DType dtype : kInputs) {
    for (const auto& [rowwise, columnwise] :
         {std::pair{true, true}, {true, false}, {false, true}}) {
      Bench bench;
      QuantizeOptions options;
      options.format = dtype == DType::kF16 ? Fp8Format::kE5M2 : Fp8Format::kE4M3;
      const Tensor x = bench.arena.tensor(Category::kActivations, "x", dtype, {rows, cols});
      const Tensor skip = bench.upload(std::vector<float>{0}, {1});
      options.skip = skip.as<float>();
      Fp8Tensor row(bench, GetParam(), rows, cols, options.format);
      Fp8Tensor col(bench, GetParam(), cols, rows, options.format);
      const Fp8View row_view = row.view(), col_view = col.view();
      write(bench, x, testing::many_scales(rows, cols, 1));
      Graph graph(bench.ctx, [&] {
        quantize(rowwise ? &row_view : nullptr, columnwise ? &col_view : nullptr, x, options,
                 bench.stream);
      });

      const auto expect_values_of = [&](uint64_t seed, const char* when) {
        const std::vector<float> values = rounded(testing::many_scales(rows, cols, seed), dtype);
        const auto compare = [&](const Fp8View& view, const Fp8Bytes& wanted, const char* copy) {
          const Fp8Bytes got = download(bench, view);
          EXPECT_EQ(difference(got.codes, wanted.codes), "equal")
              << to_string(dtype) << " " << copy << " codes, " << when;
          EXPECT_EQ(difference(got.scales, wanted.scales), "equal")
              << to_string(dtype) << " " << copy << " scales, " << when;
        };
        if (rowwise) {
          compare(row_view, quantize_by_the_book(values, rows, cols, GetParam(), dtype, options),
                  "rowwise");
        }
        if (columnwise) {
          compare(col_view,
                  quantize_by_the_book(testing::transposed(values, rows, cols), cols, rows,
                                       GetParam(), dtype, options),
                  "columnwise");
        }
      };
      write(bench, x, testing::many_scales(rows, cols, 2));
      graph.replay();
      expect_values_of(2, "flag 0");
      write(bench, skip, {1});
      write(bench, x, testing::many_scales(rows, cols, 3));
      graph.replay();
      expect_values_of(2, "flag 1: nothing may change");
      write(bench, skip, {0});
      graph.replay();
      expect_values_of(3, "flag 0 again");
    }
  }
}

TEST_P(Capture, DequantizeLayoutsAndRebuild) {
  const int64_t rows = 130, cols = 272;
  const Grouping grouping = GetParam();
  const auto bytes = [&](uint64_t seed) {
    return quantize_by_the_book(testing::many_scales(rows, cols, seed), rows, cols, grouping,
                                DType::kF32, {});
  };
  Bench bench;
  Fp8Tensor x(bench, grouping, rows, cols), back(bench, grouping, rows, cols),
      columnwise(bench, grouping, cols, rows);
  const Tensor compact_scales =
      bench.arena.tensor(Category::kScales, "compact", scale_dtype(grouping),
                         compact_scale_shape(grouping, rows, cols));
  const Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kF32, {rows, cols});
  const CompactFp8View compact{x.codes, compact_scales, grouping};
  const auto work = [&] {
    dequantize(y, x.view(), bench.stream);
    to_compact_layout(compact, x.view(), bench.stream);
    to_gemm_layout(back.view(), compact, bench.stream);
    if (rebuildable(grouping)) {
      rebuild_columnwise(columnwise.view(), x.view(), bench.stream);
    }
  };
  write(bench, x, bytes(1));
  Graph graph(bench.ctx, work);
  for (const uint64_t seed : {2, 3}) {
    const Fp8Bytes input = bytes(seed);
    write(bench, x, input);
    graph.replay();
    const auto replayed = bench.download<uint8_t>(y);
    const Fp8Bytes there_and_back = download(bench, back.view());
    EXPECT_EQ(there_and_back, input) << "seed " << seed;
    const Fp8Bytes rebuilt = download(bench, columnwise.view());
    for (const View& part :
         {y.view(), back.codes.view(), back.scales.view(), columnwise.codes.view(),
          columnwise.scales.view(), compact_scales.view()}) {
      fill_bytes(part, 0xff, bench.stream);
    }
    work();
    EXPECT_EQ(difference(replayed, bench.download<uint8_t>(y)), "equal") << "seed " << seed;
    if (rebuildable(grouping)) {
      EXPECT_EQ(download(bench, columnwise.view()), rebuilt) << "seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllGroupings, Capture, ::testing::ValuesIn(testing::kGroupings),
                         [](const auto& info) {
                           std::string name = to_string(info.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

// Block-scaled, padded (M is no multiple of 8) and widened products, replayed with other codes and
// scales at the same addresses.
TEST(CaptureGemm, ReplayIsTheEagerProduct) {
  const int64_t n = 136, k = 320;
  constexpr std::pair<Grouping, Grouping> kPairs[] = {
      {Grouping::k1x128, Grouping::k128x128}, {Grouping::k128x128, Grouping::k1x128},
      {Grouping::k1x128, Grouping::k1x128},   {Grouping::k128x128, Grouping::k128x128},
      {Grouping::kMx1x32, Grouping::kMx1x32}, {Grouping::kMx1x32, Grouping::kMx32x32}};
  for (const auto& [x_grouping, w_grouping] : kPairs) {
    for (const int64_t m : {64, 37}) {
      const auto bytes = [&](int64_t outer, Grouping grouping, uint64_t seed) {
        return quantize_by_the_book(testing::many_scales(outer, k, seed, 0.01), outer, k, grouping,
                                    DType::kF32, {});
      };
      Bench bench;
      Fp8Tensor x(bench, x_grouping, m, k), w(bench, w_grouping, n, k);
      const Tensor y = bench.arena.tensor(Category::kActivations, "y", DType::kBF16, {m, n});
      const auto work = [&] { fp8_gemm(y, x.view(), w.view(), {}, bench.ctx); };
      write(bench, x, bytes(m, x_grouping, 1));
      write(bench, w, bytes(n, w_grouping, 2));
      Graph graph(bench.ctx, work);
      const auto first = bench.download<uint8_t>(y);
      for (const uint64_t seed : {3, 5}) {
        write(bench, x, bytes(m, x_grouping, seed));
        write(bench, w, bytes(n, w_grouping, seed + 1));
        fill_bytes(y, 0xff, bench.stream);
        graph.replay();
        const auto replayed = bench.download<uint8_t>(y);
        EXPECT_NE(replayed, first);
        fill_bytes(y, 0xff, bench.stream);
        work();
        EXPECT_EQ(difference(replayed, bench.download<uint8_t>(y)), "equal")
            << to_string(x_grouping) << " by " << to_string(w_grouping) << ", M " << m;
      }
    }
  }
}

}  // namespace
}  // namespace rowshard
