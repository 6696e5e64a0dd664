#include "fp8/fp8_matrix.h"

#include <gtest/gtest.h>

#include "fp8/quantize.h"
#include "fp8_test_data.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::download;
using testing::Fp8Bytes;

constexpr int64_t kRows = 160, kCols = 288;
using Request = std::optional<bool>;

std::string name_of(Request request) {
  return request ? (*request ? "true" : "false") : "unchanged";
}

struct Matrices {
  Bench bench;
  Tensor high_precision;  // [kRows, kCols] bf16
  Fp8Bytes rowwise, columnwise;

  explicit Matrices(Grouping grouping) {
    std::vector<float> x = testing::many_scales(kRows, kCols, 21);
    high_precision = upload_as(bench, x, DType::kBF16, {kRows, kCols});
    rowwise =
        testing::quantize_by_the_book(x, kRows, kCols, grouping, DType::kBF16, QuantizeOptions{});
    columnwise = testing::quantize_by_the_book(testing::transposed(x, kRows, kCols), kCols, kRows,
                                               grouping, DType::kBF16, QuantizeOptions{});
  }

  std::pair<Tensor, Tensor> memory(Grouping grouping, bool is_rowwise, const Fp8Bytes& bytes) {
    const Shape shape = is_rowwise ? Shape{kRows, kCols} : Shape{kCols, kRows};
    Tensor codes = bench.arena.tensor(is_rowwise ? Category::kRowwiseShard : Category::kColumnwise,
                                      "codes", DType::kE4M3, shape);
    Tensor scales = bench.arena.tensor(Category::kScales, "scales", scale_dtype(grouping),
                                       gemm_scale_shape(grouping, shape[0], shape[1]));
    copy(codes, ConstView(bytes.codes.data(), DType::kE4M3, shape, kHost), bench.stream);
    copy(scales, ConstView(bytes.scales.data(), scale_dtype(grouping), scales.shape(), kHost),
         bench.stream);
    bench.stream.synchronize();
    return {std::move(codes), std::move(scales)};
  }

  Fp8Matrix make(Grouping grouping, Usage copies) {
    Fp8Matrix matrix("layers.3.up_proj", kRows, kCols, grouping, bench.ctx.device());
    if (copies.rowwise) {
      auto [codes, scales] = memory(grouping, true, rowwise);
      matrix.own_rowwise(std::move(codes), std::move(scales));
    }
    if (copies.columnwise) {
      auto [codes, scales] = memory(grouping, false, columnwise);
      matrix.own_columnwise(std::move(codes), std::move(scales));
    }
    return matrix;
  }

  Fp8Matrix::Source source() {
    return [this](const Fp8View* row, const Fp8View* col, Context& ctx) {
      quantize(row, col, high_precision, {}, ctx.stream);
    };
  }

  void expect_copies(const Fp8Matrix& matrix, Usage usage, const std::string& what) {
    EXPECT_EQ(matrix.usage(), usage) << what << " has " << to_string(matrix.usage());
    if (usage.rowwise) {
      EXPECT_EQ(download(bench, matrix.rowwise()), rowwise) << what;
    } else {
      EXPECT_THROW(matrix.rowwise(), UsageError) << what;
      EXPECT_EQ(matrix.rowwise_bytes(), 0) << what;
    }
    if (usage.columnwise) {
      EXPECT_EQ(download(bench, matrix.columnwise()), columnwise) << what;
    } else {
      EXPECT_THROW(matrix.columnwise(), UsageError) << what;
      EXPECT_EQ(matrix.columnwise_bytes(), 0) << what;
    }
  }
};

// What a cell of the table must give: the copies afterwards, or nothing when it is refused.
std::optional<Usage> expected_cell(Grouping grouping, bool has_source, Usage have, Request row,
                                   Request col) {
  if (!row && !col) {
    return have;
  }
  const Usage want{row.value_or(have.rowwise), col.value_or(have.columnwise)};
  if (want == Usage{}) {
    return std::nullopt;
  }
  if (has_source) {
    return want;
  }
  if (rebuildable(grouping)) {
    return have == Usage{} ? std::nullopt : std::optional(want);
  }
  // 1×128 and MX 1×32 without a source: nothing can be made, nothing may be lost.
  return want == have ? std::optional(have) : std::nullopt;
}

class Fp8MatrixUsage : public ::testing::TestWithParam<Grouping> {};

TEST_P(Fp8MatrixUsage, EveryRequestInEveryState) {
  const Grouping grouping = GetParam();
  Matrices m(grouping);
  int refused = 0, granted = 0;
  for (const Usage have : {Usage{true, false}, Usage{false, true}, Usage{true, true}, Usage{}}) {
    for (const Request row : {Request(true), Request(false), Request()}) {
      for (const Request col : {Request(true), Request(false), Request()}) {
        for (const bool has_source : {false, true}) {
          Fp8Matrix matrix = m.make(grouping, have);
          if (has_source) {
            matrix.set_source(m.source());
          }
          const std::string what = message(to_string(grouping), " with ", to_string(have),
                                           has_source ? " and a source" : "", ", request (",
                                           name_of(row), ", ", name_of(col), ")");
          const uint64_t version = matrix.version();
          const auto expected = expected_cell(grouping, has_source, have, row, col);
          if (expected) {
            ++granted;
            EXPECT_NO_THROW(matrix.update_usage(row, col, m.bench.ctx)) << what;
            m.expect_copies(matrix, *expected, what);
          } else {
            ++refused;
            EXPECT_THROW(matrix.update_usage(row, col, m.bench.ctx), UsageError) << what;
            m.expect_copies(matrix, have, what + ", refused");  // nothing changed
          }
          EXPECT_EQ(matrix.version(), version) << what;
        }
      }
    }
  }
  EXPECT_GT(refused, 8);
  EXPECT_GT(granted, 30);
}

// The cells as people read them, for the two kinds of grouping.
TEST(Fp8MatrixTable, SquareBlocksRebuildBothWays) {
  for (const Grouping grouping : {Grouping::k128x128, Grouping::kMx32x32}) {
    Matrices m(grouping);
    Fp8Matrix a = m.make(grouping, {true, false});
    a.update_usage(true, true, m.bench.ctx);
    m.expect_copies(a, {true, true}, "built");
    a.update_usage(false, std::nullopt, m.bench.ctx);
    m.expect_copies(a, {false, true}, "rowwise dropped");
    a.update_usage(true, false, m.bench.ctx);
    m.expect_copies(a, {true, false}, "rowwise rebuilt, columnwise dropped");
    EXPECT_THROW(a.update_usage(false, std::nullopt, m.bench.ctx), UsageError);
    EXPECT_THROW(a.update_usage(false, false, m.bench.ctx), UsageError);
    m.expect_copies(a, {true, false}, "refused");
  }
}

TEST(Fp8MatrixTable, RowGroupsAreKeptOrRefused) {
  for (const Grouping grouping : {Grouping::k1x128, Grouping::kMx1x32}) {
    Matrices m(grouping);
    Fp8Matrix both = m.make(grouping, {true, true});
    EXPECT_THROW(both.update_usage(true, false, m.bench.ctx), UsageError);
    EXPECT_THROW(both.update_usage(false, true, m.bench.ctx), UsageError);
    m.expect_copies(both, {true, true}, "a drop that could not be undone");
    both.discard({false, true});  // said knowingly
    m.expect_copies(both, {true, false}, "discarded");
    EXPECT_THROW(both.update_usage(true, true, m.bench.ctx), UsageError);
  }
}

TEST_P(Fp8MatrixUsage, MessagesNameMatrixStateRequestAndRemedy) {
  Matrices m(GetParam());
  Fp8Matrix matrix = m.make(GetParam(), {true, false});
  try {
    matrix.update_usage(false, false, m.bench.ctx);
    FAIL();
  } catch (const UsageError& error) {
    const std::string text = error.what();
    for (const char* part :
         {"layers.3.up_proj", "[160, 288]", "{rowwise}", "columnwise false", "discard"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }
}

TEST_P(Fp8MatrixUsage, ARowwiseWriteMakesTheColumnwiseCopyUnreadable) {
  const Grouping grouping = GetParam();
  Matrices m(grouping);
  Fp8Matrix matrix = m.make(grouping, {true, true});
  matrix.set_source(m.source());
  const void* address = matrix.columnwise().codes.data;
  // A loader overwrites the rowwise bytes in place.
  fill_bytes(matrix.mutable_rowwise().codes, 0x38, m.bench.stream);
  matrix.rowwise_written();
  EXPECT_EQ(matrix.usage(), (Usage{true, false}));
  EXPECT_THROW(matrix.columnwise(), UsageError);
  // Asked for, it is made again, in its old memory.
  matrix.update_usage(std::nullopt, true, m.bench.ctx);
  EXPECT_EQ(matrix.columnwise().codes.data, address);
  if (rebuildable(grouping)) {
    const auto codes = download(m.bench, matrix.columnwise()).codes;
    EXPECT_TRUE(std::all_of(codes.begin(), codes.end(), [](uint8_t c) { return c == 0x38; }));
  }
  // Stale and no longer wanted: its bytes go back.
  matrix.rowwise_written();
  matrix.update_usage(true, false, m.bench.ctx);
  EXPECT_EQ(matrix.columnwise_bytes(), 0);
}

TEST_P(Fp8MatrixUsage, BoundMemoryComesAndGoes) {
  const Grouping grouping = GetParam();
  Matrices m(grouping);
  auto [codes, scales] = m.memory(grouping, true, m.rowwise);
  Fp8Matrix matrix("w", kRows, kCols, grouping, m.bench.ctx.device());
  matrix.bind_rowwise(codes, scales);
  EXPECT_TRUE(matrix.rowwise_is_bound());
  EXPECT_EQ(matrix.rowwise().codes.data, codes.view().data);
  matrix.set_source(m.source());
  matrix.update_usage(true, true, m.bench.ctx);
  m.expect_copies(matrix, {true, true}, "gathered and rebuilt");
  matrix.unbind_rowwise();  // reshard
  m.expect_copies(matrix, {false, true}, "resharded");
  matrix.bind_rowwise(codes, scales, Contents::kUnchanged);
  m.expect_copies(matrix, {true, true}, "gathered again, the same values");
  matrix.unbind_rowwise();
  matrix.bind_rowwise(codes, scales);
  EXPECT_EQ(matrix.usage(), (Usage{true, false})) << "new values";
  EXPECT_THROW(matrix.columnwise(), UsageError);
}

TEST(Fp8Matrix, BindChecks) {
  Matrices m(Grouping::k128x128);
  auto [codes, scales] = m.memory(Grouping::k128x128, true, m.rowwise);
  auto [col_codes, col_scales] = m.memory(Grouping::k128x128, false, m.columnwise);
  Fp8Matrix matrix("w", kRows, kCols, Grouping::k128x128, m.bench.ctx.device());
  EXPECT_THROW(matrix.bind_rowwise(col_codes, col_scales), ShapeError);
  EXPECT_THROW(matrix.bind_rowwise(codes, scales.view().slice_rows(0, 1)), ShapeError);
  EXPECT_EQ(matrix.usage(), Usage{});
  EXPECT_THROW(matrix.rowwise_written(), LogicError);
  matrix.own_rowwise(std::move(codes), std::move(scales));
  EXPECT_THROW(matrix.unbind_rowwise(), LogicError);
  auto [again, again_scales] = m.memory(Grouping::k128x128, true, m.rowwise);
  EXPECT_THROW(matrix.bind_rowwise(again, again_scales), LogicError);
  m.expect_copies(matrix, {true, false}, "after refused calls");
}

TEST(Fp8Matrix, BytesAreCountedByCategory) {
  Matrices m(Grouping::k128x128);
  Fp8Matrix matrix = m.make(Grouping::k128x128, {true, false});
  const int64_t scales = m.bench.arena.bytes(Category::kScales).now;
  EXPECT_EQ(m.bench.arena.bytes(Category::kRowwiseShard).now, kRows * kCols);
  EXPECT_EQ(m.bench.arena.bytes(Category::kColumnwise).now, 0);
  matrix.update_usage(true, true, m.bench.ctx);
  EXPECT_EQ(m.bench.arena.bytes(Category::kColumnwise).now, kRows * kCols);
  EXPECT_EQ(m.bench.arena.bytes(Category::kScales).now - scales, 3 * 4 * 4);
  matrix.update_usage(true, false, m.bench.ctx);
  EXPECT_EQ(m.bench.arena.bytes(Category::kColumnwise).now, 0);
  EXPECT_EQ(m.bench.arena.bytes(Category::kScales).now, scales);
}

// Fault one: weights loaded in high precision, a validation pass in MXFP8, then training in MXFP8.
// Validation asks (true, unchanged), inference (true, false), training (true, true).
TEST(Fp8MatrixFaults, ValidationLeavesWhatTheNextBackwardNeeds) {
  for (const Grouping grouping : testing::kGroupings) {
    Matrices m(grouping);
    Fp8Matrix trained = m.make(grouping, {true, true});
    for (int step = 0; step < 3; ++step) {
      trained.update_usage(true, true, m.bench.ctx);
      m.expect_copies(trained, {true, true}, "training");
      trained.update_usage(true, std::nullopt, m.bench.ctx);
      m.expect_copies(trained, {true, true}, "validation");
    }
    Fp8Matrix loaded("loaded", kRows, kCols, grouping, m.bench.ctx.device());
    loaded.set_source(m.source());
    loaded.update_usage(true, std::nullopt, m.bench.ctx);
    m.expect_copies(loaded, {true, false}, "validated first");
    loaded.update_usage(true, true, m.bench.ctx);
    m.expect_copies(loaded, {true, true}, "then trained");
    loaded.update_usage(true, false, m.bench.ctx);
    m.expect_copies(loaded, {true, false}, "inference drops what it can make again");
    loaded.update_usage(true, true, m.bench.ctx);
    m.expect_copies(loaded, {true, true}, "and training has it back");
  }
}

TEST(Fp8MatrixFaults, InferenceToTrainingFailsAtTheTransitionWithTheRemedy) {
  for (const Grouping grouping : {Grouping::k1x128, Grouping::kMx1x32}) {
    Matrices m(grouping);
    Fp8Matrix matrix = m.make(grouping, {true, false});
    try {
      matrix.update_usage(true, true, m.bench.ctx);
      FAIL() << to_string(grouping);
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("set_source"), std::string::npos) << error.what();
    }
    m.expect_copies(matrix, {true, false}, "refused");
  }
}

// Fault two: a matrix copied to host memory and back, whichever copies it has.
TEST_P(Fp8MatrixUsage, ToTheHostAndBack) {
  const Grouping grouping = GetParam();
  Matrices m(grouping);
  Arena host_arena(kHost);
  host_arena.set_poison(true);
  for (const Usage have : {Usage{true, false}, Usage{false, true}, Usage{true, true}, Usage{}}) {
    Fp8Matrix matrix = m.make(grouping, have);
    Fp8Matrix on_host = matrix.copy_to(host_arena, m.bench.stream);
    m.bench.stream.synchronize();
    EXPECT_EQ(on_host.device(), kHost);
    EXPECT_EQ(on_host.usage(), have);
    EXPECT_EQ(on_host.name(), matrix.name());
    EXPECT_EQ(on_host.version(), matrix.version());
    if (have.rowwise) {
      EXPECT_EQ(on_host.rowwise().codes.device, kHost);
      EXPECT_NE(on_host.rowwise().codes.data, matrix.rowwise().codes.data);
    }
    matrix.discard({true, true});
    Fp8Matrix back = on_host.copy_to(m.bench.arena, m.bench.stream);
    EXPECT_EQ(back.device(), m.bench.ctx.device());
    m.expect_copies(back, have, "copied back");
  }
}

// The format travels too: what is rebuilt from a travelled copy is of the same format.
TEST(Fp8Matrix, AnE5M2MatrixStaysOne) {
  Bench bench;
  testing::Fp8Tensor e5m2(bench, Grouping::k128x128, kRows, kCols, Fp8Format::kE5M2);
  const Fp8View view = e5m2.view();
  const Tensor x = bench.upload(testing::many_scales(kRows, kCols, 3), {kRows, kCols});
  QuantizeOptions options;
  options.format = Fp8Format::kE5M2;
  quantize(&view, nullptr, x, options, bench.stream);
  Fp8Matrix matrix("e5m2", kRows, kCols, Grouping::k128x128, bench.ctx.device());
  matrix.bind_rowwise(view.codes, view.scales);
  Arena host_arena(kHost);
  Fp8Matrix on_host = matrix.copy_to(host_arena, bench.stream);
  bench.stream.synchronize();
  EXPECT_EQ(on_host.format(), Fp8Format::kE5M2);
  Fp8Matrix back = on_host.copy_to(bench.arena, bench.stream);
  back.update_usage(std::nullopt, true, bench.ctx);
  EXPECT_EQ(back.columnwise().codes.dtype, DType::kE5M2);
  EXPECT_EQ(download(bench, back.rowwise()), download(bench, view));
}

TEST(Fp8Matrix, AStaleCopyDoesNotTravel) {
  Matrices m(Grouping::k128x128);
  Fp8Matrix matrix = m.make(Grouping::k128x128, {true, true});
  matrix.rowwise_written();
  Arena host_arena(kHost);
  EXPECT_EQ(matrix.copy_to(host_arena, m.bench.stream).usage(), (Usage{true, false}));
  m.bench.stream.synchronize();
}

INSTANTIATE_TEST_SUITE_P(AllGroupings, Fp8MatrixUsage, ::testing::ValuesIn(testing::kGroupings),
                         [](const auto& info) {
                           std::string name = to_string(info.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

}  // namespace
}  // namespace rowshard
