#include <gtest/gtest.h>

#include "core/error.h"
#include "fp8/fp8_view.h"
#include "fp8/rebuild.h"
#include "fp8_test_data.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::difference;
using testing::download;
using testing::Fp8Tensor;

TEST(Layout, ShapesOfTheWorkedExample) {
  EXPECT_EQ(gemm_scale_shape(Grouping::k128x128, 300, 384), (Shape{3, 4}));
  EXPECT_EQ(gemm_scale_shape(Grouping::k128x128, 384, 300), (Shape{3, 4}));
  EXPECT_EQ(gemm_scale_shape(Grouping::k1x128, 300, 384), (Shape{3, 300}));
  EXPECT_EQ(gemm_scale_shape(Grouping::k1x128, 384, 300), (Shape{3, 384}));
  EXPECT_EQ(gemm_scale_shape(Grouping::k1x128, 301, 384), (Shape{3, 304}));
  EXPECT_EQ(compact_scale_shape(Grouping::k128x128, 300, 384), (Shape{3, 3}));
  EXPECT_EQ(compact_scale_shape(Grouping::k1x128, 300, 384), (Shape{300, 3}));
  EXPECT_EQ(gemm_scale_shape(Grouping::kMx1x32, 300, 384), (Shape{300, 12}));
  EXPECT_EQ(gemm_scale_shape(Grouping::kMx32x32, 300, 384), (Shape{10, 12}));
}

class Layout : public ::testing::TestWithParam<Grouping> {};

// Every scale by hand: from its place in the compact layout to its place in the GEMM layout.
TEST_P(Layout, GemmAndCompactHoldTheSameScales) {
  const Grouping grouping = GetParam();
  for (const Shape dims : {Shape{300, 384}, Shape{1, 1}, Shape{129, 1000}, Shape{640, 70}}) {
    Bench bench;
    const int64_t outer = dims[0], inner = dims[1];
    std::vector<float> x = testing::many_scales(outer, inner, 6);
    Tensor input = bench.upload(x, dims);
    Fp8Tensor gemm(bench, grouping, outer, inner);
    const Fp8View gemm_view = gemm.view();
    quantize(&gemm_view, nullptr, input, {}, bench.stream);

    const Shape compact_shape = compact_scale_shape(grouping, outer, inner);
    Tensor scales =
        bench.arena.tensor(Category::kScales, "compact", scale_dtype(grouping), compact_shape);
    const CompactFp8View compact{gemm.codes, scales, grouping};
    to_compact_layout(compact, gemm_view, bench.stream);
    const Shape gemm_shape = gemm_scale_shape(grouping, outer, inner);
    if (is_mx(grouping)) {
      EXPECT_EQ(bench.download<uint8_t>(scales), bench.download<uint8_t>(gemm.scales));
    } else {
      const auto from = bench.download<float>(gemm.scales), to = bench.download<float>(scales);
      for (int64_t o = 0; o < compact_shape[0]; ++o) {
        for (int64_t i = 0; i < compact_shape[1]; ++i) {
          const int64_t at =
              grouping == Grouping::k1x128 ? i * gemm_shape[1] + o : o * gemm_shape[1] + i;
          EXPECT_EQ(to[o * compact_shape[1] + i], from[at]) << o << ", " << i;
        }
      }
    }
    // And back, into codes of its own: padding included.
    Fp8Tensor again(bench, grouping, outer, inner);
    to_gemm_layout(again.view(), compact, bench.stream);
    EXPECT_EQ(download(bench, again.view()), download(bench, gemm_view)) << dims;
  }
}

TEST_P(Layout, RebuiltIsQuantizedDirectlyBothWays) {
  const Grouping grouping = GetParam();
  for (const Shape dims : {Shape{300, 384}, Shape{1, 1}, Shape{128, 128}, Shape{256, 640},
                           Shape{129, 1000}, Shape{640, 70}, Shape{64, 48}, Shape{272, 144}}) {
    Bench bench;
    const int64_t rows = dims[0], cols = dims[1];
    std::vector<float> x = testing::many_scales(rows, cols, 7);
    Tensor input = bench.upload(x, dims);
    Fp8Tensor row(bench, grouping, rows, cols), col(bench, grouping, cols, rows);
    const Fp8View row_view = row.view(), col_view = col.view();
    quantize(&row_view, &col_view, input, {}, bench.stream);
    Fp8Tensor rebuilt(bench, grouping, cols, rows), back(bench, grouping, rows, cols);
    if (!rebuildable(grouping)) {
      EXPECT_THROW(rebuild_columnwise(rebuilt.view(), row_view, bench.stream), ShapeError);
      continue;
    }
    rebuild_columnwise(rebuilt.view(), row_view, bench.stream);
    rebuild_columnwise(back.view(), rebuilt.view(), bench.stream);
    const auto wanted_col = download(bench, col_view), got_col = download(bench, rebuilt.view());
    EXPECT_EQ(difference(got_col.codes, wanted_col.codes), "equal") << dims;
    EXPECT_EQ(difference(got_col.scales, wanted_col.scales), "equal") << dims;
    EXPECT_EQ(download(bench, back.view()), download(bench, row_view)) << dims;
  }
}

// Started beside a quantiser, as dgrad does it, a rebuild gives the same bytes, and what comes next
// on the stream finds both done.
TEST(Rebuild, BesideAQuantizerGivesTheSameBytes) {
  for (const Shape dims : {Shape{2048, 1024}, Shape{272, 144}, Shape{129, 1000}}) {
    Bench bench;
    const int64_t rows = dims[0], cols = dims[1];
    const Tensor w = bench.upload(testing::many_scales(rows, cols, 7), dims);
    const Tensor dy = bench.upload(testing::many_scales(rows, cols, 8), dims);
    Fp8Tensor row(bench, Grouping::k128x128, rows, cols),
        col(bench, Grouping::k128x128, cols, rows);
    Fp8Tensor dy8(bench, Grouping::k1x128, rows, cols), wanted(bench, Grouping::k1x128, rows, cols);
    const Fp8View row_view = row.view(), col_view = col.view(), dy_view = dy8.view(),
                  wanted_view = wanted.view();
    quantize(&row_view, &col_view, w, {}, bench.stream);
    quantize(&wanted_view, nullptr, dy, {}, bench.stream);
    for (int repeat = 0; repeat < 3; ++repeat) {
      Fp8Tensor rebuilt(bench, Grouping::k128x128, cols, rows);
      quantize(&dy_view, nullptr, dy, {}, bench.stream);
      rebuild_columnwise(rebuilt.view(), row_view, bench.stream, RebuildStart::kBesideQuantizer);
      EXPECT_EQ(download(bench, rebuilt.view()), download(bench, col_view)) << dims;
      EXPECT_EQ(download(bench, dy_view), download(bench, wanted_view)) << dims;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllGroupings, Layout, ::testing::ValuesIn(testing::kGroupings),
                         [](const auto& info) {
                           std::string name = to_string(info.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST(LayoutErrors, AreNamed) {
  Bench bench;
  Fp8Tensor row(bench, Grouping::k128x128, 300, 384), same(bench, Grouping::k128x128, 300, 384);
  EXPECT_THROW(rebuild_columnwise(same.view(), row.view(), bench.stream), ShapeError);
  // GEMM-layout scales offered as compact ones.
  EXPECT_THROW(
      to_gemm_layout(same.view(), CompactFp8View{row.codes, row.scales, Grouping::k128x128},
                     bench.stream),
      ShapeError);
  // A scale matrix without its padding.
  Tensor unpadded = bench.arena.tensor(Category::kScales, "s", DType::kF32, {3, 3});
  EXPECT_THROW(check(ConstFp8View(row.codes, unpadded, Grouping::k128x128), "w"), ShapeError);
}

}  // namespace
}  // namespace rowshard
