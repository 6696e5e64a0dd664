#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/environment.h"
#include "core/matmul.h"
#include "core/rng.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;

TEST(DType, Bf16RoundsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(1.0f + 0x1p-8f).bits, 0x3f80) << "half way, even below";
  EXPECT_EQ(bf16(1.0f + 3 * 0x1p-8f).bits, 0x3f82) << "half way, even above";
  EXPECT_EQ(bf16(std::nextafter(1.0f + 0x1p-8f, 2.0f)).bits, 0x3f81);
  EXPECT_EQ(bf16(3.4e38f).bits, 0x7f80) << "beyond the largest: infinity";
  // A NaN whose payload is in the lower half only.
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(DType, F16MatchesTheCompilersHalfOnEveryPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    f16 ours;
    ours.bits = static_cast<uint16_t>(bits);
    _Float16 theirs;
    std::memcpy(&theirs, &ours.bits, 2);
    const float wide = static_cast<float>(ours);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(theirs)));
      continue;
    }
    ASSERT_EQ(wide, static_cast<float>(theirs)) << bits;
    ASSERT_EQ(f16(wide).bits, bits) << "round trip";
  }
}

TEST(DType, F16RoundsLikeTheCompiler) {
  const Philox random{7, 1};
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(random.words(i)[0]);
    if (std::isnan(value))
      continue;
    const _Float16 theirs = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &theirs, 2);
    ASSERT_EQ(f16(value).bits, bits) << value;
  }
}

TEST(Philox, KnownAnswers) {
  // Test vectors of the Random123 distribution, philox4x32-10.
  const Philox zero{0, 0};
  EXPECT_EQ(zero.words(0),
            (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  const Philox ones{~0ull, ~0ull};
  EXPECT_EQ(ones.words(~0ull),
            (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(Arena, CountsByCategoryAndReusesAddresses) {
  Bench bench;
  Arena& arena = bench.arena;
  Buffer a = arena.allocate(Category::kGathered, "a", 1000);
  EXPECT_EQ(arena.bytes(Category::kGathered).now, 1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 256, 0u);
  std::byte* address = a.data();
  {
    Buffer b = arena.allocate(Category::kGathered, "b", 500);
    EXPECT_EQ(arena.bytes(Category::kGathered).now, 1500);
  }
  EXPECT_EQ(arena.bytes(Category::kGathered).now, 1000);
  EXPECT_EQ(arena.bytes(Category::kGathered).peak, 1500);
  arena.mark_steady();
  a.reset();
  EXPECT_EQ(arena.bytes(Category::kGathered).steady, 1000);
  EXPECT_EQ(arena.total().now, 0);
  Buffer again = arena.allocate(Category::kColumnwise, "again", 1000);
  EXPECT_EQ(again.data(), address) << "the same size gets the same address back";
  EXPECT_EQ(arena.live(Category::kColumnwise).front().first, "again");
  Buffer moved = std::move(again);
  EXPECT_FALSE(again);  // NOLINT: a moved-from buffer is empty
  EXPECT_EQ(arena.bytes(Category::kColumnwise).now, 1000);
}

TEST(Arena, NamesAndBytesFollowTheLiveBuffers) {
  Bench bench;
  Arena& arena = bench.arena;
  Buffer first = arena.allocate(Category::kGathered, "a name longer than a short string", 512);
  Buffer second = arena.allocate(Category::kGathered, "second", 300);
  std::byte* const first_address = first.data();
  first.reset();
  // 257 to 512 bytes are one block size: the freed block comes back under the new name and bytes.
  Buffer third = arena.allocate(Category::kAdapter, "third", 500);
  EXPECT_EQ(third.data(), first_address);
  Buffer fourth = arena.allocate(Category::kGathered, "fourth", 512);
  EXPECT_NE(fourth.data(), first_address);
  using Live = std::vector<std::pair<std::string, int64_t>>;
  EXPECT_EQ(arena.live(Category::kGathered), (Live{{"fourth", 512}, {"second", 300}}));
  EXPECT_EQ(arena.live(Category::kAdapter), (Live{{"third", 500}}));
  EXPECT_EQ(arena.total().now, 512 + 300 + 500);
  // Blocks in use survive a trim and are handed out again afterwards.
  std::byte* const second_address = second.data();
  arena.trim();
  second.reset();
  EXPECT_EQ(arena.allocate(Category::kScales, "again", 300).data(), second_address);
  third.reset();
  fourth.reset();
  EXPECT_EQ(arena.total().now, 0);
  EXPECT_EQ(arena.total().peak, 512 + 300 + 500);
}

// What a graph's recording used must be there at every replay, and nobody else's in between.
TEST(Arena, BlocksOfARecordingAreServedToRecordingsOnly) {
  Bench bench;
  Arena& arena = bench.arena;
  const auto take = [&] { return arena.allocate(Category::kActivations, "x", 1000); };
  std::byte* const shared = take().data();
  Buffer outside = take();
  ASSERT_EQ(outside.data(), shared);
  std::byte* recorded = nullptr;
  {
    const ArenaRecording recording(arena);
    EXPECT_THROW(ArenaRecording{arena}, LogicError);
    outside.reset();  // allocated before: goes back to where it came from
    Buffer inside = take();
    recorded = inside.data();
    EXPECT_NE(recorded, shared);
    EXPECT_EQ(arena.bytes(Category::kActivations).now, 1000);
  }
  EXPECT_EQ(arena.total().now, 0);
  arena.trim();  // takes `shared` away, and leaves `recorded`
  Buffer one = take(), other = take();
  EXPECT_NE(one.data(), recorded);
  EXPECT_NE(other.data(), recorded);
  const ArenaRecording again(arena);
  EXPECT_EQ(take().data(), recorded);
}

// A buffer may outlive its arena object: the state stays until the last one is gone.
TEST(Arena, BuffersMayOutliveTheArena) {
  Buffer buffer;
  {
    Arena arena(testing::test_device);
    buffer = arena.allocate(Category::kWorkspace, "survivor", 1 << 12);
  }
  EXPECT_NE(buffer.data(), nullptr);
  EXPECT_NO_THROW(buffer.reset());
}

TEST(Arena, OutOfMemoryNamesTheRequestAndTheLiveBytes) {
  if (testing::test_device.is_host())
    GTEST_SKIP() << "the host overcommits";
  Bench bench;
  Buffer a = bench.arena.allocate(Category::kAdapter, "a", 4096);
  try {
    bench.arena.allocate(Category::kGathered, "too much", int64_t{1} << 46);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("too much"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("adapter"), std::string::npos);
  }
}

TEST(View, CopyFillConvertAndSlices) {
  Bench bench;
  Tensor x = bench.upload(std::vector<float>{1, 2, 3, 4, 5, 6}, {3, 2});
  Tensor y = bench.arena.tensor(Category::kWorkspace, "y", DType::kBF16, {3, 2});
  convert(y, x, bench.stream);
  Tensor z = bench.arena.tensor(Category::kWorkspace, "z", DType::kF32, {3, 2});
  convert(z, y, bench.stream);
  EXPECT_EQ(bench.download<float>(z), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(bench.download<float>(z.view().slice_rows(1, 1)), (std::vector<float>{3, 4}));
  fill_bytes(z.view().slice_rows(0, 2), 0, bench.stream);
  EXPECT_EQ(bench.download<float>(z), (std::vector<float>{0, 0, 0, 0, 5, 6}));
  EXPECT_THROW(z.view().slice_rows(2, 2), ShapeError);
  EXPECT_THROW(z.view().reshape({5}), ShapeError);
  EXPECT_THROW(z.as<bf16>(), ShapeError);
  EXPECT_THROW(copy(z, y, bench.stream), ShapeError);
}

TEST(Stream, EventsOrderAndTime) {
  const Device device = testing::test_device;
  Stream a(device), b(device, "other");
  Event begin(device, true), end(device, true);
  EXPECT_THROW(b.wait(begin), LogicError) << "never recorded";
  begin.record(a);
  b.wait(begin);
  end.record(b);
  end.synchronize();
  EXPECT_GE(elapsed_ms(begin, end), 0);
  EXPECT_FALSE(a.capturing());
}

// Every operand gets a magnitude of its own, so that a swapped or transposed one shows.
struct MatmulCase {
  int64_t m, n, k;
  bool ta, tb;
  DType dtype, result;
};

class Matmul : public ::testing::TestWithParam<MatmulCase> {};

TEST_P(Matmul, AgreesWithTheDefinition) {
  const MatmulCase c = GetParam();
  if (c.dtype == DType::kF64 && testing::test_device.is_cuda())
    GTEST_SKIP() << "f64 is host only";
  Bench bench;
  const Philox random{3, 5};
  std::vector<float> a(c.m * c.k), b(c.k * c.n), y(c.m * c.n);
  for (size_t i = 0; i < a.size(); ++i)
    a[i] = static_cast<float>(bf16(random.normal(i)));
  for (size_t i = 0; i < b.size(); ++i)
    b[i] = static_cast<float>(bf16(random.normal(1000000 + i)));
  for (size_t i = 0; i < y.size(); ++i)
    y[i] = static_cast<float>(bf16(random.normal(2000000 + i)));
  const auto typed = [&](const std::vector<float>& values, Shape shape, DType dtype) {
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    Stream host(kHost);
    convert(View(bytes.data(), dtype, shape, kHost),
            ConstView(values.data(), DType::kF32, shape, kHost), host);
    Tensor tensor = bench.arena.tensor(Category::kWorkspace, "t", dtype, shape);
    copy(tensor, ConstView(bytes.data(), dtype, shape, kHost), bench.stream);
    bench.stream.synchronize();
    return tensor;
  };
  Tensor ta = typed(a, c.ta ? Shape{c.k, c.m} : Shape{c.m, c.k}, c.dtype);
  Tensor tb = typed(b, c.tb ? Shape{c.n, c.k} : Shape{c.k, c.n}, c.dtype);
  Tensor ty = typed(y, {c.m, c.n}, c.result);
  matmul(ty, ta, c.ta ? Transpose::kYes : Transpose::kNo, tb,
         c.tb ? Transpose::kYes : Transpose::kNo, 2.0f, 0.5f, bench.ctx);
  std::vector<std::byte> raw = bench.download<std::byte>(ty);
  std::vector<float> got(c.m * c.n);
  Stream host(kHost);
  convert(View(got.data(), DType::kF32, {c.m, c.n}, kHost),
          ConstView(raw.data(), c.result, {c.m, c.n}, kHost), host);
  // f32 sums of k products of about 1, and one rounding to the result's dtype.
  const double unit = c.result == DType::kBF16 ? 0x1p-8 : 0x1p-22;
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < c.n; ++j) {
      double sum = 0, magnitude = 1;
      for (int64_t l = 0; l < c.k; ++l) {
        const double p =
            double{a[c.ta ? l * c.m + i : i * c.k + l]} * b[c.tb ? j * c.k + l : l * c.n + j];
        sum += p;
        magnitude += std::abs(p);
      }
      const double want = 2 * sum + 0.5 * y[i * c.n + j];
      ASSERT_NEAR(got[i * c.n + j], want, unit * (std::abs(want) + 1) + 0x1p-20 * magnitude)
          << i << " " << j;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Matmul,
    ::testing::Values(MatmulCase{5, 7, 9, false, false, DType::kF32, DType::kF32},
                      MatmulCase{5, 7, 9, true, false, DType::kF32, DType::kF32},
                      MatmulCase{5, 7, 9, false, true, DType::kF32, DType::kF32},
                      MatmulCase{5, 7, 9, true, true, DType::kF64, DType::kF64},
                      MatmulCase{64, 48, 96, false, true, DType::kBF16, DType::kBF16},
                      MatmulCase{64, 16, 96, false, true, DType::kBF16, DType::kF32},
                      MatmulCase{33, 16, 64, true, false, DType::kBF16, DType::kF32},
                      MatmulCase{1, 3, 1, false, false, DType::kF32, DType::kF32}));

TEST(MatmulEdges, EmptyOperands) {
  Bench bench;
  Tensor y = bench.arena.tensor(Category::kWorkspace, "y", DType::kF32, {2, 3});
  Tensor a = bench.arena.tensor(Category::kWorkspace, "a", DType::kF32, {2, 0});
  Tensor b = bench.arena.tensor(Category::kWorkspace, "b", DType::kF32, {0, 3});
  matmul(y, a, Transpose::kNo, b, Transpose::kNo, 1, 0, bench.ctx);
  EXPECT_EQ(bench.download<float>(y), std::vector<float>(6, 0.0f)) << "poison must be overwritten";
  Tensor wrong = bench.arena.tensor(Category::kWorkspace, "w", DType::kF32, {1, 3});
  EXPECT_THROW(matmul(y, a, Transpose::kNo, wrong, Transpose::kNo, 1, 0, bench.ctx), ShapeError);
}

TEST(Plan, AStepOnTheDeviceWithoutMemoryCountsBytes) {
  const Device plan{DeviceKind::kPlan, 0};
  Arena arena(plan);
  Stream stream(plan);
  Context ctx{arena, stream};
  Tensor a = arena.tensor(Category::kActivations, "a", DType::kF32, {1 << 20, 1 << 20});
  Tensor y = arena.tensor(Category::kActivations, "y", DType::kF32, {1 << 20, 1 << 20});
  matmul(y, a, Transpose::kNo, a, Transpose::kNo, 1, 0, ctx);
  fill_bytes(y, 0, stream);
  EXPECT_EQ(arena.bytes(Category::kActivations).now, int64_t{8} << 40);
}

TEST(Environment, SwitchesAndIntegers) {
  setenv("ROWSHARD_TEST_VARIABLE", "2", 1);
  EXPECT_EQ(environment_int("ROWSHARD_TEST_VARIABLE"), 2);
  EXPECT_THROW(environment_switch("ROWSHARD_TEST_VARIABLE"), ConfigError);
  setenv("ROWSHARD_TEST_VARIABLE", "1", 1);
  EXPECT_EQ(environment_switch("ROWSHARD_TEST_VARIABLE"), true);
  setenv("ROWSHARD_TEST_VARIABLE", "one", 1);
  EXPECT_THROW(environment_int("ROWSHARD_TEST_VARIABLE"), ConfigError);
  unsetenv("ROWSHARD_TEST_VARIABLE");
  EXPECT_EQ(environment("ROWSHARD_TEST_VARIABLE"), std::nullopt);
}

}  // namespace
}  // namespace rowshard
