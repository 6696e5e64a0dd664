// Trainable weights beside frozen ones, split over any number of ranks: codes, scales, sums and
// updates are those of one rank with everything.
#include <cmath>

#include "distributed/dist_fixture.h"
#include "finetune/adamw.h"
#include "fp8/quantize.h"
#include "shard_source.h"

namespace rowshard {
namespace {

using testing::DistBench;
using testing::fp8_weight;
using testing::plain_weight;

WeightSpec trained(WeightSpec weight) {
  weight.trainable = true;
  return weight;
}

/// Partial blocks, several weights to a part, frozen and trainable in turns.
UnitLayout mixed(int ranks) {
  return UnitLayout("mixed",
                    {fp8_weight("q", 192, 320), trained(plain_weight("norm", {75})),
                     trained(fp8_weight("up", 200, 96)), plain_weight("frozen norm", {33}),
                     trained(fp8_weight("k", 3, 129)), trained(plain_weight("bias", {7}))},
                    ranks);
}

/// A master: each 128x128 block has its own magnitude.
float master(const WeightSpec& weight, int64_t i) {
  const int64_t cols = weight.shape.rank() == 2 ? weight.shape[1] : 1 << 20;
  const int64_t row = i / cols, col = i % cols;
  return std::ldexp(static_cast<float>((i * 7919 + weight.shape[0]) % 251 - 125),
                    static_cast<int>(row / 128 * 3 + col / 128 * 5) - 9);
}
float gradient(int rank, const WeightSpec& weight, int64_t i) {  // sums are exact
  return static_cast<float>((i * 31 + weight.shape[0] + 5 * rank) % 17 - 8) * 0.125f;
}

class MasterSource : public testing::KnownSource {
 public:
  void read_masters(const WeightSpec& weight, int64_t begin, int64_t end, float* to) override {
    for (int64_t i = begin; i < end; ++i)
      to[i - begin] = master(weight, i);
    masters_read += end - begin;
  }
  int64_t masters_read = 0;
};

class TrainableTest : public testing::DistributedTest {
 protected:
  int64_t now(Category category) const { return bench.arena.bytes(category).now; }
  void gather(ShardedUnit& unit) {
    unit.gather(communication);
    unit.finish_gather(bench.stream);
  }
  static std::vector<int> trainable_weights() { return {1, 2, 4, 5}; }

  /// Every trainable weight of the gathered unit is what its whole values give.
  void expect_stored(ShardedUnit& unit, const std::function<float(int weight, int64_t i)>& value) {
    Arena arena(kHost);
    Stream stream(kHost);
    for (const int w : trainable_weights()) {
      const WeightSpec& weight = unit.layout().weights()[w];
      std::vector<float> values(weight.elements());
      for (int64_t i = 0; i < weight.elements(); ++i)
        values[i] = value(w, i);
      if (weight.storage == Storage::kPlain) {
        std::vector<bf16> wanted(values.begin(), values.end());
        const auto got = bench.download<bf16>(unit.plain(w));
        for (size_t i = 0; i < wanted.size(); ++i)
          ASSERT_EQ(got[i].bits, wanted[i].bits) << weight.name << " " << i;
        continue;
      }
      const int64_t n = weight.shape[0], k = weight.shape[1];
      const Tensor codes = arena.tensor(Category::kWorkspace, "codes", DType::kE4M3, {n, k});
      const Tensor scales = arena.tensor(Category::kWorkspace, "scales", DType::kF32,
                                         gemm_scale_shape(Grouping::k128x128, n, k));
      const Fp8View whole{codes, scales, Grouping::k128x128};
      quantize(&whole, nullptr, ConstView(values.data(), DType::kF32, {n, k}, kHost), {}, stream);
      const auto* code = reinterpret_cast<const uint8_t*>(codes.view().byte_data());
      EXPECT_EQ(bench.download<uint8_t>(unit.fp8(w).rowwise().codes),
                std::vector<uint8_t>(code, code + n * k))
          << weight.name;
      EXPECT_EQ(
          bench.download<float>(unit.fp8(w).rowwise().scales),
          std::vector<float>(scales.as<float>(), scales.as<float>() + scales.shape().elements()))
          << weight.name;
    }
  }
  void expect_frozen(ShardedUnit& unit) {
    const WeightSpec& q = unit.layout().weights()[0];
    std::vector<uint8_t> wanted(q.bytes());
    for (int64_t i = 0; i < q.bytes(); ++i)
      wanted[i] = testing::weight_byte(q.name, i);
    EXPECT_EQ(bench.download<uint8_t>(unit.fp8(0).rowwise().codes), wanted);
    EXPECT_EQ(bench.download<float>(unit.fp8(0).rowwise().scales), testing::gemm_scales(q));
    EXPECT_EQ(unit.plain(3).shape, Shape{33});
  }
  void add_gradients(ShardedUnit& unit) {
    for (const int w : trainable_weights()) {
      const WeightSpec& weight = unit.layout().weights()[w];
      std::vector<float> values(weight.elements());
      for (int64_t i = 0; i < weight.elements(); ++i)
        values[i] = gradient(rank(), weight, i);
      const View to = unit.gradient(w, bench.stream);
      copy(to, ConstView(values.data(), DType::kF32, to.shape, kHost), bench.stream);
      bench.stream.synchronize();
    }
  }
  float summed(const WeightSpec& weight, int64_t i) const {
    float sum = 0;
    for (int r = 0; r < size(); ++r)
      sum += gradient(r, weight, i);
    return sum;
  }

  DistBench bench;
  Stream communication{device(), "gather"};
  std::unique_ptr<Communicator> group = world().communicator("gather");
};

TEST_F(TrainableTest, CodesAndScalesAreThoseOfTheWholeMatrices) {
  ShardedUnit unit(mixed(size()), *group, bench.arena);
  MasterSource source;
  unit.load(source, bench.stream);
  int64_t owned = 0, elements = 0;
  for (const Bytes& bytes :
       world().bootstrap().all_gather(std::as_bytes(std::span(&source.masters_read, 1)))) {
    owned += *reinterpret_cast<const int64_t*>(bytes.data());
  }
  for (const int w : trainable_weights())
    elements += unit.layout().weights()[w].elements();
  EXPECT_EQ(owned, elements) << "nobody reads a master twice";
  for (int pass = 0; pass < 2; ++pass) {
    gather(unit);
    EXPECT_EQ(now(Category::kGathered), unit.layout().transient_bytes());
    expect_frozen(unit);
    expect_stored(unit, [&](int w, int64_t i) { return master(unit.layout().weights()[w], i); });
    EXPECT_THROW(unit.trainable()[0]->refresh(bench.stream), LogicError) << "while gathered";
    unit.reshard();
    if (size() > 1) {
      unit.gather(communication);
      EXPECT_THROW(unit.trainable()[0]->refresh(bench.stream), LogicError) << "on its way";
      unit.reshard();
    }
    EXPECT_EQ(now(Category::kGathered), 0);
    EXPECT_THROW(unit.fp8(2), UsageError);
    EXPECT_THROW(unit.plain(1), UsageError);
  }
}

// Two steps of AdamW on sharded masters, against one on whole vectors.
TEST_F(TrainableTest, UpdatesAreThoseOfWholeVectors) {
  ShardedUnit unit(mixed(size()), *group, bench.arena);
  MasterSource source;
  unit.load(source, bench.stream);
  const auto& weights = unit.layout().weights();
  const AdamW hyper{.lr = 0.25, .weight_decay = 0.1};

  std::vector<Tensor> m, v;
  for (const auto& part : unit.trainable()) {
    for (auto* moments : {&m, &v}) {
      moments->push_back(
          bench.arena.tensor(Category::kOptimizer, "moments", DType::kF32, part->masters().shape));
      fill_bytes(moments->back(), 0, bench.stream);
    }
  }
  Stream host(kHost);
  std::vector<std::vector<float>> p(weights.size()), pm(weights.size()), pv(weights.size());
  for (const int w : trainable_weights()) {
    for (int64_t i = 0; i < weights[w].elements(); ++i)
      p[w].push_back(master(weights[w], i));
    pm[w].assign(p[w].size(), 0.0f);
    pv[w].assign(p[w].size(), 0.0f);
  }
  gather(unit);
  unit.fp8(2).update_usage(std::nullopt, true, bench.ctx);  // goes stale with the update
  unit.reshard();
  for (int step = 1; step <= 2; ++step) {
    const int64_t before = bench.arena.total().now;
    if (step == 1 || rank() % 2 == 0 || size() == 1)
      add_gradients(unit);  // in the second step some ranks have no tokens
    group->reset_wire_bytes();
    int64_t wire = 0;
    for (size_t i = 0; i < unit.trainable().size(); ++i) {
      TrainablePart& part = *unit.trainable()[i];
      part.reduce_gradient(nullptr, bench.stream);
      EXPECT_FALSE(part.has_gradient());
      wire += part.masters().bytes() * (size() - 1);
      AdamWVectors vectors;
      vectors.parameters = part.masters();
      vectors.gradients = part.gradient_part();
      vectors.m = m[i];
      vectors.v = v[i];
      adamw(vectors, hyper, step, bench.stream);
    }
    EXPECT_EQ(group->wire_bytes(), wire) << "a part for every peer";
    for (const auto& part : unit.trainable())
      part->refresh(bench.stream);
    EXPECT_EQ(bench.arena.total().now, before) << "gradients are gone";
    for (const int w : trainable_weights()) {
      std::vector<float> g(p[w].size());
      for (size_t i = 0; i < g.size(); ++i) {
        for (int r = 0; r < size(); ++r)
          g[i] += step == 1 || r % 2 == 0 || size() == 1 ? gradient(r, weights[w], i) : 0.0f;
      }
      const Shape shape{static_cast<int64_t>(g.size())};
      AdamWVectors vectors;
      vectors.parameters = View(p[w].data(), DType::kF32, shape, kHost);
      vectors.gradients = ConstView(g.data(), DType::kF32, shape, kHost);
      vectors.m = View(pm[w].data(), DType::kF32, shape, kHost);
      vectors.v = View(pv[w].data(), DType::kF32, shape, kHost);
      adamw(vectors, hyper, step, host);
    }
    gather(unit);
    expect_frozen(unit);
    expect_stored(unit, [&](int w, int64_t i) { return p[w][i]; });
    EXPECT_FALSE(unit.fp8(2).usage().columnwise) << "made from values that have changed";
    unit.reshard();
  }
}

// Replicas of the same parts: gradients are summed over them too.
TEST_F(TrainableTest, ReplicasSumTheirParts) {
  if (size() % 2 != 0)
    GTEST_SKIP() << "an even number of ranks makes two replicas";
  const Mesh mesh = make_mesh(size(), 2, size() / 2, 1);
  const auto shards = world().communicator("shards", mesh.group(rank(), Axis::kShard));
  const auto replicas = world().communicator("replicas", mesh.group(rank(), Axis::kReplicate));
  ShardedUnit unit(mixed(size() / 2), *shards, bench.arena);
  MasterSource source;
  unit.load(source, bench.stream);
  add_gradients(unit);
  for (size_t p = 0; p < unit.trainable().size(); ++p) {
    TrainablePart& part = *unit.trainable()[p];
    part.reduce_gradient(replicas.get(), bench.stream);
    const auto got = bench.download<float>(part.gradient_part());
    const TrainableLayout& layout = unit.layout().trainable()[p];
    std::vector<float> wanted(layout.part * shards->size(), 0.0f);
    for (size_t i = 0; i < layout.weights.size(); ++i) {
      const WeightSpec& weight = unit.layout().weights()[layout.weights[i]];
      for (int64_t e = 0; e < weight.elements(); ++e)
        wanted[layout.offsets[i] + e] = summed(weight, e);
    }
    const auto begin = wanted.begin() + shards->rank() * layout.part;
    EXPECT_EQ(got, std::vector<float>(begin, begin + layout.part));
  }
}

TEST_F(TrainableTest, WhatCannotBeIsRefused) {
  EXPECT_THROW(UnitLayout("u", {trained({"w", {64, 64}, Storage::kMxRowwise, DType::kE4M3})}, 1),
               ConfigError);
  ShardedUnit unit(mixed(size()), *group, bench.arena);
  testing::KnownSource frozen_only;
  EXPECT_THROW(unit.load(frozen_only, bench.stream), LogicError);
  EXPECT_THROW(unit.gradient(0, bench.stream), LogicError);
}

}  // namespace
}  // namespace rowshard
