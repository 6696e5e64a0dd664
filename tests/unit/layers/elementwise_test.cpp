#include "layers/elementwise.h"

#include "layer_test.h"
#include "layers/reduction.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

template <typename T>
class ElementwiseOnDevice : public ::testing::Test {};
using Types = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(ElementwiseOnDevice, Types);

// One f32 operation and one rounding: the same bits on every device.
TYPED_TEST(ElementwiseOnDevice, AddScaleAndBroadcastAreExact) {
  using T = TypeParam;
  Bench bench;
  const Shape shape{7, 129};
  const int64_t count = 7 * 129;
  const auto a = testing::narrowed<T>(testing::random_values(count, 1));
  const auto b = testing::narrowed<T>(testing::random_values(count, 2, 10));
  const Tensor at = bench.upload(a, shape), bt = bench.upload(b, shape);
  add(bt, at, bt, bench.stream);
  scale(at, 0.3, bench.stream);
  Doubles sum, scaled;
  for (int64_t i = 0; i < count; ++i) {
    sum.push_back(widen(narrow<T>(widen(a[i]) + widen(b[i]))));
    scaled.push_back(widen(narrow<T>(widen(a[i]) * 0.3f)));
  }
  EXPECT_EQ(testing::widened(bench.download<T>(bt)), sum);
  EXPECT_EQ(testing::widened(bench.download<T>(at)), scaled);

  const std::vector<T> row(a.begin(), a.begin() + 129);
  broadcast_row(bt, bench.upload(row, {129}), bench.stream);
  const Doubles got = testing::widened(bench.download<T>(bt));
  for (int64_t i = 0; i < count; ++i)
    ASSERT_EQ(got[i], widen(row[i % 129])) << i;
}

TYPED_TEST(ElementwiseOnDevice, RowsAreGatheredAndScatteredBack) {
  using T = TypeParam;
  Bench bench;
  const int64_t tokens = 9, width = 35;
  const auto x = testing::narrowed<T>(testing::random_values(tokens * width, 1));
  const std::vector<int32_t> rows{8, 0, 5};
  const Tensor xt = bench.upload(x, {tokens, width});
  const Tensor rt = bench.upload(rows, {3});
  const Tensor y = bench.upload(std::vector<T>(3 * width, T(7.f)), {3, width});
  gather_rows(y, xt, rt, bench.stream);
  Doubles gathered, scattered = testing::widened(x);
  for (int32_t row : rows) {
    for (int64_t c = 0; c < width; ++c) {
      const T value = x[row * width + c];
      gathered.push_back(widen(value));
      scattered[row * width + c] = widen(narrow<T>(widen(value) + widen(value)));
    }
  }
  EXPECT_EQ(testing::widened(bench.download<T>(y)), gathered);
  scatter_add_rows(xt, y, rt, bench.stream);
  EXPECT_EQ(testing::widened(bench.download<T>(xt)), scattered);
}

// The order of layers/reduction.h, written once more without any of its code.
double ordered_sum(const Doubles& terms) {
  const auto chunk_sum = [](const double* x, size_t count) {
    Doubles lanes(256, 0.0);
    for (size_t i = 0; i < count; ++i)
      lanes[i % 256] += x[i];
    for (size_t width = 128; width > 0; width /= 2) {
      for (size_t lane = 0; lane < width; ++lane)
        lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
  };
  Doubles chunks;
  for (size_t begin = 0; begin < terms.size(); begin += 16384) {
    chunks.push_back(
        chunk_sum(terms.data() + begin, std::min<size_t>(16384, terms.size() - begin)));
  }
  return chunk_sum(chunks.data(), chunks.size());
}

TYPED_TEST(ElementwiseOnDevice, SumsHaveTheSameBitsEverywhere) {
  using T = TypeParam;
  Bench bench;
  for (int64_t count : {0, 1, 255, 16384, 16385, 300000}) {
    SCOPED_TRACE(count);
    Doubles x = testing::random_values(count, 1);
    for (int64_t i = 0; i < count; ++i)
      x[i] *= std::exp2(i / 1000 % 40 - 20);
    x = testing::representable<T>(x);
    Doubles squares;
    for (double value : x)
      squares.push_back(value * value);
    const Tensor xt = bench.upload(testing::narrowed<T>(x), {count});
    const Tensor result = bench.upload(Doubles{NAN}, {1});
    sum_of_squares(result, xt, false, bench.ctx);
    EXPECT_EQ(bench.download<double>(result)[0], ordered_sum(squares));
    sum(result, xt, true, bench.ctx);
    EXPECT_EQ(bench.download<double>(result)[0], ordered_sum(squares) + ordered_sum(x));
  }
}

TYPED_TEST(ElementwiseOnDevice, CountsWhatIsNotFinite) {
  using T = TypeParam;
  Bench bench;
  std::vector<T> x(100001, T(3e38f));
  const Tensor count = bench.upload(std::vector<int32_t>{-1}, {1});
  const auto counted = [&](bool accumulate) {
    count_nonfinite(count, bench.upload(x, {100001}), accumulate, bench.ctx);
    return bench.download<int32_t>(count)[0];
  };
  EXPECT_EQ(counted(false), 0);
  x[0] = T(NAN);
  x[70000] = T(INFINITY);
  x[100000] = T(-INFINITY);
  EXPECT_EQ(counted(false), 3);
  EXPECT_EQ(counted(true), 6);
}

TEST(Elementwise, RefusesRowsThatAreNotThere) {
  if (testing::test_device.is_cuda())
    GTEST_SKIP() << "only the host looks at the rows";
  Bench bench;
  const Tensor x = bench.upload(std::vector<float>(12), {4, 3});
  const Tensor y = bench.upload(std::vector<float>(3), {1, 3});
  const Tensor rows = bench.upload(std::vector<int32_t>{4}, {1});
  EXPECT_THROW(gather_rows(y, x, rows, bench.stream), ShapeError);
  EXPECT_THROW(scatter_add_rows(x, y, rows, bench.stream), ShapeError);
  EXPECT_THROW(add(x, y, y, bench.stream), ShapeError);
}

}  // namespace
}  // namespace rowshard
