#include "layers/attention.h"

#include "cuda_graph.h"
#include "layer_test.h"
#include "layers/attention_calls.h"
#include "test_device.h"

namespace rowshard {
namespace {

using testing::Bench;
using testing::Doubles;
using testing::view_of;

// An attention problem in f64, with the host operation and a reference written from the formula.
struct Problem {
  std::vector<int32_t> bounds;
  int64_t heads, kv_heads, d;
  double scale;
  Doubles q, k, v, d_o;
  Doubles o, lse, dq, dk, dv;

  Problem(std::vector<int32_t> bounds_, int64_t heads_, int64_t kv_heads_, int64_t d_)
      : bounds(std::move(bounds_)), heads(heads_), kv_heads(kv_heads_), d(d_) {
    scale = 1 / std::sqrt(static_cast<double>(d));
    q = testing::random_values(tokens() * heads * d, 1);
    k = testing::random_values(tokens() * kv_heads * d, 2);
    v = testing::random_values(tokens() * kv_heads * d, 3);
    d_o = testing::random_values(tokens() * heads * d, 4);
    // Every head and every few tokens their own magnitude.
    for (int64_t i = 0; i < tokens() * kv_heads * d; ++i) {
      v[i] *= 1 + (i / d) % kv_heads + i / (kv_heads * d) / 16 % 4;
    }
  }
  int64_t tokens() const { return bounds.back(); }
  Shape shape() const { return {tokens(), heads, d}; }
  Shape kv_shape() const { return {tokens(), kv_heads, d}; }

  void forward() {
    Arena arena(kHost);
    Stream stream(kHost);
    Context ctx{arena, stream};
    const Segments segments(bounds, ctx);
    o.assign(q.size(), NAN);
    lse.assign(heads * tokens(), NAN);
    attention(view_of(o, shape()), view_of(lse, {tokens(), heads}), view_of(q, shape()),
              view_of(k, kv_shape()), view_of(v, kv_shape()), segments, scale, ctx);
  }
  void backward() {
    Arena arena(kHost);
    Stream stream(kHost);
    Context ctx{arena, stream};
    const Segments segments(bounds, ctx);
    dq.assign(q.size(), NAN);
    dk.assign(k.size(), NAN);
    dv.assign(v.size(), NAN);
    attention_backward(view_of(dq, shape()), view_of(dk, kv_shape()), view_of(dv, kv_shape()),
                       view_of(d_o, shape()), view_of(q, shape()), view_of(k, kv_shape()),
                       view_of(v, kv_shape()), view_of(o, shape()), view_of(lse, {tokens(), heads}),
                       segments, scale, ctx);
  }
  /// o and lse by the definition, one query at a time.
  void reference(Doubles& expected_o, Doubles& expected_lse) const {
    expected_o.assign(q.size(), 0);
    expected_lse.assign(heads * tokens(), 0);
    for (size_t s = 0; s + 1 < bounds.size(); ++s) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / (heads / kv_heads);
        for (int64_t t = bounds[s]; t < bounds[s + 1]; ++t) {
          Doubles weight;
          double total = 0;
          for (int64_t j = bounds[s]; j <= t; ++j) {
            double score = 0;
            for (int64_t c = 0; c < d; ++c) {
              score += q[(t * heads + h) * d + c] * k[(j * kv_heads + g) * d + c];
            }
            weight.push_back(std::exp(score * scale));
            total += weight.back();
          }
          for (int64_t j = bounds[s]; j <= t; ++j) {
            for (int64_t c = 0; c < d; ++c) {
              expected_o[(t * heads + h) * d + c] +=
                  weight[j - bounds[s]] / total * v[(j * kv_heads + g) * d + c];
            }
          }
          expected_lse[t * heads + h] = std::log(total);
        }
      }
    }
  }
};

// Lengths around the block size of the host, a segment of one token, and a head size that is no
// multiple of a vector.
TEST(Attention, FollowsTheDefinition) {
  for (auto [heads, kv_heads, d] : {std::array<int64_t, 3>{4, 2, 6}, {3, 3, 16}, {9, 3, 64}}) {
    SCOPED_TRACE(d);
    Problem p({0, 1, 48, 97, 144, 260}, heads, kv_heads, d);
    p.forward();
    Doubles o, lse;
    p.reference(o, lse);
    testing::expect_close(p.o, o, 1e-12, 1e-12);
    testing::expect_close(p.lse, lse, 1e-12, 1e-12);
  }
}

TEST(Attention, BackwardAgreesWithFiniteDifferences) {
  Problem p({0, 5, 6, 13}, 4, 2, 6);
  const auto loss = [&] {
    p.forward();
    return testing::dot(p.o, p.d_o);
  };
  loss();
  p.backward();
  testing::expect_gradient(p.q, p.dq, loss);
  testing::expect_gradient(p.k, p.dk, loss);
  testing::expect_gradient(p.v, p.dv, loss);
}

// Segments of several blocks, at a sample of elements.
TEST(Attention, BackwardAcrossBlocksAgreesWithFiniteDifferences) {
  Problem p({0, 110, 120}, 2, 1, 16);
  const auto loss = [&] {
    p.forward();
    return testing::dot(p.o, p.d_o);
  };
  loss();
  p.backward();
  testing::expect_gradient(p.q, p.dq, loss, 61, 1e-5);
  testing::expect_gradient(p.k, p.dk, loss, 31, 1e-5);
  testing::expect_gradient(p.v, p.dv, loss, 31, 1e-5);
}

struct DeviceResult {
  Doubles o, lse, dq, dk, dv;
};

template <typename T>
DeviceResult run_on_device(const Problem& p) {
  Bench bench;
  const Segments segments(p.bounds, bench.ctx);
  const Tensor q = bench.upload(testing::narrowed<T>(p.q), p.shape());
  const Tensor k = bench.upload(testing::narrowed<T>(p.k), p.kv_shape());
  const Tensor v = bench.upload(testing::narrowed<T>(p.v), p.kv_shape());
  const Tensor d_o = bench.upload(testing::narrowed<T>(p.d_o), p.shape());
  const auto make = [&](DType dtype, Shape shape) {
    return bench.arena.tensor(Category::kActivations, "result", dtype, shape);
  };
  const DType type = DTypeOf<T>::value;
  const Tensor o = make(type, p.shape()), dq = make(type, p.shape());
  const Tensor dk = make(type, p.kv_shape()), dv = make(type, p.kv_shape());
  const Tensor lse = make(DType::kF32, {p.tokens(), p.heads});
  attention(o, lse, q, k, v, segments, p.scale, bench.ctx);
  attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, segments, p.scale, bench.ctx);
  const auto wide = [&](const Tensor& t) { return testing::widened(bench.download<T>(t)); };
  return {wide(o), testing::widened(bench.download<float>(lse)), wide(dq), wide(dk), wide(dv)};
}

template <typename T>
void compare_with_f64(std::vector<int32_t> bounds, int64_t heads, int64_t kv_heads, int64_t d) {
  Problem p(std::move(bounds), heads, kv_heads, d);
  for (Doubles* x : {&p.q, &p.k, &p.v, &p.d_o})
    *x = testing::representable<T>(*x);
  p.forward();
  p.backward();
  const DeviceResult got = run_on_device<T>(p);
  // bf16: o is rounded, and so are the probabilities and their gradients before the tensor cores
  // read them; a dozen roundings of the largest term is generous, a lost tile is far outside.
  const double rounding = std::is_same_v<T, bf16> ? 12 * testing::kRounding<T> : 1e-5;
  testing::expect_close(got.o, p.o, rounding * testing::largest(p.v), rounding);
  testing::expect_close(got.lse, p.lse, 1e-4, 1e-5);
  testing::expect_close(got.dq, p.dq, rounding * testing::largest(p.dq), rounding);
  testing::expect_close(got.dk, p.dk, rounding * testing::largest(p.dk), rounding);
  testing::expect_close(got.dv, p.dv, rounding * testing::largest(p.dv), rounding);
}

TEST(AttentionOnDevice, Bf16StaysNearF64) {
  for (int64_t d : {16, 32, 64, 128}) {
    SCOPED_TRACE(d);
    compare_with_f64<bf16>({0, 1, 64, 70, 201}, 4, 2, d);
  }
  compare_with_f64<bf16>({0, 128}, 9, 3, 64);
  compare_with_f64<bf16>({0, 7}, 1, 1, 64);
}

// Odd lengths in no order, among them single tokens and one that is most of the tokens: cuDNN cuts
// the backward into several calls here, and equal segments of whole tiles go another way.
TEST(AttentionOnDevice, PackedSegmentsStayNearF64) {
  for (int64_t d : {64, 128}) {
    SCOPED_TRACE(d);
    compare_with_f64<bf16>({0, 3, 4, 41, 300, 301, 333, 590, 720, 1001}, 8, 2, d);
    compare_with_f64<bf16>({0, 17, 529, 530}, 4, 4, d);
    compare_with_f64<bf16>({0, 128, 256, 384}, 6, 2, d);
    compare_with_f64<bf16>({0, 600}, 3, 1, d);
  }
}

TEST(AttentionOnDevice, F32StaysNearF64OnTheHost) {
  if (testing::test_device.is_cuda())
    GTEST_SKIP() << "cuda attention takes bf16";
  compare_with_f64<float>({0, 1, 48, 70, 201}, 9, 3, 64);
}

TEST(AttentionOnDevice, LargeScoresDoNotOverflow) {
  Problem p({0, 70}, 2, 1, 64);
  for (double& x : p.q)
    x *= 60;
  for (Doubles* x : {&p.q, &p.k, &p.v, &p.d_o})
    *x = testing::representable<bf16>(*x);
  const DeviceResult got = run_on_device<bf16>(p);
  p.forward();
  testing::expect_close(got.o, p.o, 0.1 * testing::largest(p.v), 0.1);
}

// Bit for bit: what a segment gives does not depend on what its neighbours hold.
TEST(AttentionOnDevice, SegmentsDoNotSeeEachOther) {
  Problem p({0, 37, 90, 130}, 4, 2, 64);
  const DeviceResult before = run_on_device<bf16>(p);
  const auto change = [](Doubles& x, int64_t begin, int64_t end, int64_t row) {
    const Doubles other = testing::random_values((end - begin) * row, 77, 5);
    std::copy(other.begin(), other.end(), x.begin() + begin * row);
  };
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 37}, {90, 130}}) {
    change(p.q, begin, end, 4 * 64);
    change(p.d_o, begin, end, 4 * 64);
    change(p.k, begin, end, 2 * 64);
    change(p.v, begin, end, 2 * 64);
  }
  const DeviceResult after = run_on_device<bf16>(p);
  const auto middle = [](const Doubles& x, int64_t row) {
    return Doubles(x.begin() + 37 * row, x.begin() + 90 * row);
  };
  EXPECT_EQ(middle(before.o, 4 * 64), middle(after.o, 4 * 64));
  EXPECT_EQ(middle(before.dq, 4 * 64), middle(after.dq, 4 * 64));
  EXPECT_EQ(middle(before.dk, 2 * 64), middle(after.dk, 2 * 64));
  EXPECT_EQ(middle(before.dv, 2 * 64), middle(after.dv, 2 * 64));
  EXPECT_NE(before.o, after.o);
}

TEST(AttentionOnDevice, TheFutureIsNotSeen) {
  Problem p({0, 100}, 2, 1, 64);
  const DeviceResult before = run_on_device<bf16>(p);
  const int64_t cut = 70;
  for (size_t i = cut * 64; i < p.k.size(); ++i) {
    p.k[i] = 3 - p.k[i];
    p.v[i] = 3 - p.v[i];
  }
  const DeviceResult after = run_on_device<bf16>(p);
  const auto past = [&](const Doubles& x) { return Doubles(x.begin(), x.begin() + cut * 2 * 64); };
  EXPECT_EQ(past(before.o), past(after.o));
  EXPECT_NE(before.o, after.o);
}

TEST(AttentionOnDevice, TwoRunsGiveTheSameBits) {
  Problem p({0, 150, 201}, 9, 3, 64);
  const DeviceResult first = run_on_device<bf16>(p), second = run_on_device<bf16>(p);
  EXPECT_EQ(first.dq, second.dq);
  EXPECT_EQ(first.dk, second.dk);
  EXPECT_EQ(first.dv, second.dv);
}

// Recorded once, replayed with other values at the same addresses: the bits of eager calls.
TEST(AttentionOnDevice, AGraphReplaysTheEagerBits) {
  for (const std::vector<int32_t>& bounds : {std::vector<int32_t>{0, 37, 38, 201}, {0, 128, 256}}) {
    Bench bench;
    const int64_t tokens = bounds.back(), heads = 4, kv_heads = 2, d = 64;
    const Shape shape{tokens, heads, d}, kv_shape{tokens, kv_heads, d};
    const Segments segments(bounds, bench.ctx);
    const auto upload = [&](Shape s, uint32_t seed) {
      return bench.upload(testing::narrowed<bf16>(testing::random_values(s.elements(), seed)), s);
    };
    const Tensor q = upload(shape, 1), k = upload(kv_shape, 2), v = upload(kv_shape, 3),
                 d_o = upload(shape, 4), o = upload(shape, 5), dq = upload(shape, 6),
                 dk = upload(kv_shape, 7), dv = upload(kv_shape, 8);
    const Tensor lse =
        bench.arena.tensor(Category::kActivations, "lse", DType::kF32, {tokens, heads});
    const Tensor other = upload(shape, 9), other_kv = upload(kv_shape, 10);
    const auto work = [&] {
      attention(o, lse, q, k, v, segments, 0.125, bench.ctx);
      attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, segments, 0.125, bench.ctx);
    };
    const auto results = [&] {
      std::vector<uint16_t> all;
      for (const Tensor* x : {&o, &dq, &dk, &dv}) {
        const auto bits = bench.download<uint16_t>(*x);
        all.insert(all.end(), bits.begin(), bits.end());
      }
      return all;
    };
    testing::Graph graph(bench.ctx, work);
    const auto first = results();
    copy(q, other, bench.stream);
    copy(k, other_kv, bench.stream);
    for (const Tensor* x : {&o, &dq, &dk, &dv})
      fill_bytes(*x, 0xff, bench.stream);
    bench.stream.synchronize();
    graph.replay();
    const auto replayed = results();
    EXPECT_NE(first, replayed);
    for (const Tensor* x : {&o, &dq, &dk, &dv})
      fill_bytes(*x, 0xff, bench.stream);
    work();
    EXPECT_EQ(results(), replayed);
  }
}

// The plan device takes the scratch that the device under test takes, for any packing of as many
// tokens.
TEST(AttentionOnDevice, ThePlanCountsTheScratch) {
  for (const int64_t d : {32, 64, 128}) {
    int64_t planned = -1;
    for (const bool plan : {true, false}) {
      for (const std::vector<int32_t>& bounds :
           {std::vector<int32_t>{0, 256}, {0, 1, 2, 90, 256}, {0, 128, 256}}) {
        const Device device =
            plan ? Device{DeviceKind::kPlan, testing::test_device.is_cuda()} : testing::test_device;
        Arena arena(device);
        Stream stream(device);
        Context ctx{arena, stream};
        const Segments segments(bounds, ctx);
        const auto make = [&](int64_t heads) {
          Tensor x = arena.tensor(Category::kActivations, "x", DType::kBF16, {256, heads, d});
          fill_bytes(x, 0x3c, stream);
          return x;
        };
        const Tensor q = make(6), o = make(6), d_o = make(6), dq = make(6), k = make(2),
                     v = make(2), dk = make(2), dv = make(2);
        const Tensor lse = arena.tensor(Category::kActivations, "lse", DType::kF32, {256, 6});
        attention(o, lse, q, k, v, segments, 0.1, ctx);
        attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, segments, 0.1, ctx);
        stream.synchronize();
        const int64_t peak = arena.bytes(Category::kWorkspace).peak;
        planned = planned < 0 ? peak : planned;
        EXPECT_EQ(peak, planned) << to_string(device) << ", heads of " << d;
      }
    }
    EXPECT_GT(planned, 0);
  }
}

// Every segment in one call, once; scores inside the limit; ragged counts powers of two.
TEST(AttentionCalls, CoverEverySegmentOnce) {
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> bounds{0};
    const int segments_wanted = 1 + static_cast<int>(random() % 40);
    const int longest = 1 << random() % 14;
    const bool equal = round % 5 == 0;
    const int32_t same = 128 * (1 + static_cast<int32_t>(random() % 9));
    for (int s = 0; s < segments_wanted; ++s)
      bounds.push_back(bounds.back() +
                       (equal ? same : 1 + static_cast<int32_t>(random() % longest)));
    const Segments segments(bounds, ctx);
    const int64_t group = 1 + random() % 8, kv_heads = 1 + random() % 8, heads = group * kv_heads;
    const int64_t limit = cuda::score_limit(segments.tokens(), heads);
    if (cuda::score_bytes(group, cuda::length_bucket(segments.longest())) > limit)
      continue;  // our own kernels' turn
    for (const bool backward : {false, true}) {
      const auto calls = backward ? cuda::backward_calls(segments.lengths(), heads, kv_heads)
                                  : cuda::forward_calls(segments.lengths(), kv_heads);
      int64_t next = 0;
      for (const cuda::AttentionCall& call : calls) {
        EXPECT_EQ(call.first, next);
        next += call.count;
        EXPECT_EQ(call.dense, equal);
        EXPECT_EQ(kv_heads % call.kv_heads, 0);
        for (int64_t s = call.first; s < std::min(next, segments.count()); ++s)
          EXPECT_LE(segments.lengths()[s], call.length);
        if (call.dense) {
          EXPECT_EQ(call.length, same);
        } else {
          EXPECT_TRUE(std::has_single_bit(static_cast<uint64_t>(call.count)));
        }
        if (backward) {
          EXPECT_LE(call.count * cuda::score_bytes(group * call.kv_heads, call.length), limit);
          EXPECT_TRUE(call.kv_heads == kv_heads || call.count == 1);
        }
      }
      EXPECT_GE(next, segments.count());
      EXPECT_LE(next + 1, cuda::AttentionScratch::table_entries(segments.tokens()));
      EXPECT_LT(calls.back().first, segments.count());
    }
  }
}

TEST(Segments, InDescendingLength) {
  Bench bench;
  const Segments segments({0, 5, 6, 13, 18}, bench.ctx);
  EXPECT_EQ(segments.lengths(), (std::vector<int32_t>{7, 5, 5, 1}));
  std::vector<int32_t> wanted{6, 7, 0, 5, 13, 5, 5, 1};
  while (wanted.size() < 36)
    wanted.insert(wanted.end(), {18, 0});
  EXPECT_EQ(bench.download<int32_t>(segments.by_length()), wanted);
}

TEST(Attention, RefusesHeadsThatDoNotDivide) {
  Problem p({0, 5}, 4, 2, 8);
  p.kv_heads = 3;
  p.k.resize(5 * 3 * 8);
  p.v.resize(5 * 3 * 8);
  EXPECT_THROW(p.forward(), ShapeError);
}

// The order of segments, and lengths within a bucket, are no reason for another graph.
TEST(AttentionLayout, IsWhatCallsOfCudnnDependOn) {
  const auto layout = [](const std::vector<int32_t>& lengths, int64_t heads, int64_t head_dim) {
    std::vector<int32_t> bounds{0};
    for (int32_t length : lengths)
      bounds.push_back(bounds.back() + length);
    return attention_layout(bounds, heads, heads / 2, head_dim);
  };
  EXPECT_TRUE(layout({300, 84}, 8, 32).empty()) << "our own kernels' grids depend on tokens only";
  if (layout({300, 84}, 8, 64).empty())
    GTEST_SKIP() << "this build has no cudnn-frontend";
  EXPECT_EQ(layout({300, 84}, 8, 64), layout({84, 300}, 8, 64));
  EXPECT_EQ(layout({300, 84}, 8, 64), layout({310, 74}, 8, 64));
  EXPECT_NE(layout({300, 84}, 8, 64), layout({200, 184}, 8, 64)) << "another bucket of length";
  EXPECT_NE(layout({300, 84}, 8, 64), layout({300, 42, 42}, 8, 64)) << "another count";
  EXPECT_NE(layout({256, 128}, 8, 64), layout({128, 128, 128}, 8, 64)) << "equal tiles are dense";
}

}  // namespace
}  // namespace rowshard
