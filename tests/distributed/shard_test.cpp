// Sharded units and the usage scheduler on any number of ranks: every byte of every copy, of every
// category and on the wire.
#include <chrono>
#include <thread>

#include "distributed/dist_fixture.h"
#include "fp8/quantize.h"
#include "model/weight_source.h"
#include "shard/usage_scheduler.h"
#include "shard_source.h"
#include "unit/model/file_fixture.h"

namespace rowshard {
namespace {

using testing::DistBench;
using testing::fp8_weight;
using testing::gathered_bytes;
using testing::KnownSource;
using testing::mixed_layout;
using testing::plain_weight;

class ShardTest : public testing::DistributedTest {
 protected:
  int64_t now(Category category) const { return bench.arena.bytes(category).now; }
  int64_t peak(Category category) const { return bench.arena.bytes(category).peak; }
  void gather(ShardedUnit& unit) {
    unit.gather(communication);
    unit.finish_gather(bench.stream);
  }
  std::vector<uint8_t> bytes(ShardedUnit& unit) { return testing::unit_bytes(unit, bench); }

  DistBench bench;
  Stream communication{device(), "gather"};
  std::unique_ptr<Communicator> group = world().communicator("gather");
};

TEST_F(ShardTest, EveryRankGathersEveryByteAndZeroPadding) {
  ShardedUnit unit(mixed_layout(size()), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  const std::vector<uint8_t> wanted = gathered_bytes(unit.layout());
  const auto part = wanted.begin() + rank() * unit.layout().shard_bytes();
  EXPECT_EQ(bench.download<uint8_t>(unit.shard()),
            std::vector<uint8_t>(part, part + unit.layout().shard_bytes()));
  for (int pass = 0; pass < 2; ++pass) {
    gather(unit);
    EXPECT_EQ(bytes(unit), wanted);
    for (size_t w = 0; w < unit.layout().weights().size(); ++w) {
      const WeightSpec& weight = unit.layout().weights()[w];
      const auto begin = wanted.begin() + unit.layout().offset(w);
      const std::vector<uint8_t> own(begin, begin + weight.bytes());
      if (weight.storage == Storage::kPlain) {
        EXPECT_EQ(unit.plain(w).shape, weight.shape);
        EXPECT_EQ(bench.download<uint8_t>(unit.plain(w)), own) << weight.name;
      } else {
        EXPECT_EQ(bench.download<uint8_t>(unit.fp8(w).rowwise().codes), own) << weight.name;
        // Each rank knew the scales of its own bands only.
        EXPECT_EQ(bench.download<float>(unit.fp8(w).rowwise().scales), testing::gemm_scales(weight))
            << weight.name;
      }
    }
    unit.reshard();
  }
  // A rank reads what it owns, and nobody reads a byte twice.
  int64_t owned = 0;
  for (const UnitLayout::Piece& piece : unit.layout().pieces(rank()))
    owned += piece.end - piece.begin;
  EXPECT_EQ(source.bytes_read, owned);
}

// What a rank owns as a whole it reads in its shard: nothing is copied. (The arena is poisoned, so
// a weight read at its place in the gathered buffer would show.)
TEST_F(ShardTest, WeightsThatLieInTheShardStayThere) {
  ShardedUnit unit(mixed_layout(size()), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  gather(unit);
  std::vector<bool> whole(unit.layout().weights().size(), false);
  for (const UnitLayout::Piece& piece : unit.layout().pieces(rank())) {
    whole[piece.weight] =
        piece.begin == 0 && piece.end == unit.layout().weights()[piece.weight].bytes();
  }
  const std::byte* begin = unit.shard().byte_data();
  const std::byte* end = begin + unit.shard().bytes();
  for (size_t w = 0; w < whole.size(); ++w) {
    const int weight = static_cast<int>(w);
    const bool fp8 = unit.layout().weights()[w].storage == Storage::kFp8Block;
    const ConstView view = fp8 ? unit.fp8(weight).rowwise().codes : unit.plain(weight);
    EXPECT_EQ(view.byte_data() >= begin && view.byte_data() + view.bytes() <= end, whole[w])
        << unit.layout().weights()[w].name;
  }
}

TEST_F(ShardTest, BytesPerCategory) {
  ShardedUnit unit(mixed_layout(size()), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  const UnitLayout& layout = unit.layout();
  const int64_t steady = layout.shard_bytes() + layout.scale_bytes();
  EXPECT_EQ(now(Category::kRowwiseShard), layout.shard_bytes());
  EXPECT_EQ(now(Category::kScales), layout.scale_bytes());
  EXPECT_EQ(bench.arena.total().now, steady);
  EXPECT_EQ(bench.arena.total().peak, steady) << "loading leaves and takes nothing else";
  group->reset_wire_bytes();
  gather(unit);
  EXPECT_EQ(now(Category::kGathered), size() == 1 ? 0 : layout.gathered_bytes());
  EXPECT_EQ(bench.arena.total().now, steady + now(Category::kGathered));
  EXPECT_EQ(group->wire_bytes(), layout.gathered_bytes() / size() * (size() - 1));
  unit.reshard();
  EXPECT_EQ(bench.arena.total().now, steady);
  // One byte a parameter, over the ranks, but for padding of at most 256 a weight and a rank.
  int64_t parameter_bytes = 0;
  for (const WeightSpec& weight : layout.weights())
    parameter_bytes += weight.bytes();
  EXPECT_LE(size() * layout.shard_bytes(),
            parameter_bytes + 256 * (static_cast<int64_t>(layout.weights().size()) + size()));
}

TEST_F(ShardTest, ShardsThatHoldNothing) {
  // 30 bytes: all on rank 0.
  const UnitLayout layout("tiny", {plain_weight("tiny.norm", {15})}, size());
  ShardedUnit unit(layout, *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  EXPECT_EQ(source.bytes_read, rank() == 0 ? 30 : 0);
  gather(unit);
  EXPECT_EQ(bytes(unit), gathered_bytes(layout));
  // An FP8 weight whose codes and scales only rank 0 knows.
  const UnitLayout block("one block", {fp8_weight("w", 3, 5)}, size());
  ShardedUnit small(block, *group, bench.arena);
  small.load(source, bench.stream);
  gather(small);
  EXPECT_EQ(bytes(small), gathered_bytes(block));
  EXPECT_EQ(bench.download<float>(small.fp8(0).rowwise().scales),
            testing::gemm_scales(block.weights()[0]));
}

TEST_F(ShardTest, ReadingAShardedWeightIsAUsageErrorOnEveryRank) {
  ShardedUnit unit(mixed_layout(size()), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  EXPECT_THROW(unit.fp8(1), UsageError);
  EXPECT_THROW(unit.plain(0), UsageError);
  unit.gather(communication);
  EXPECT_THROW(unit.fp8(1), UsageError) << "queued is not gathered";
  unit.finish_gather(bench.stream);
  Fp8Matrix& matrix = unit.fp8(1);
  EXPECT_NO_THROW(matrix.rowwise());
  unit.reshard();
  EXPECT_THROW(unit.fp8(1), UsageError);
  EXPECT_THROW(matrix.rowwise(), UsageError) << "a reference kept over the reshard";
  EXPECT_EQ(now(Category::kGathered), 0);
}

TEST_F(ShardTest, GatherNobodyUsedLeavesNothing) {
  ShardedUnit unit(mixed_layout(size()), *group, bench.arena);
  KnownSource source;
  unit.load(source, bench.stream);
  const int64_t count = unit.layout().gathered_bytes();
  const std::vector<uint8_t> mine(count, 0x5a);
  for (int i = 0; i < 3; ++i) {
    // One rank is late, so the others drop a gather that cannot have arrived yet. Their memory is
    // somebody else's from then on.
    if (rank() == i % size())
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    unit.gather(communication);
    unit.reshard();
    EXPECT_EQ(now(Category::kGathered), 0);
    const Tensor next = bench.upload(mine, {count});
    gather(unit);
    EXPECT_EQ(bytes(unit), gathered_bytes(unit.layout()));
    EXPECT_EQ(bench.download<uint8_t>(next), mine);
    unit.reshard();
  }
}

TEST_F(ShardTest, LoadingAgainReplacesEveryByte) {
  ShardedUnit unit(mixed_layout(size()), *group, bench.arena);
  for (const int version : {0, 1}) {
    KnownSource source(version);
    unit.load(source, bench.stream);
    EXPECT_EQ(now(Category::kGathered), 0);
    gather(unit);
    EXPECT_EQ(bytes(unit), gathered_bytes(unit.layout(), version));
    EXPECT_EQ(bench.download<float>(unit.fp8(1).rowwise().scales),
              testing::gemm_scales(unit.layout().weights()[1], version));
    EXPECT_FALSE(unit.fp8(1).usage().columnwise) << "version " << version;
    unit.fp8(1).update_usage(std::nullopt, true, bench.ctx);  // and left gathered
  }
}

// Every rank quantises only the bands it owns bytes of; what comes together is what one rank gets
// from the whole matrix.
TEST_F(ShardTest, QuantisedInBandsIsQuantisedWhole) {
  const testing::TemporaryDirectory directory;
  const nlohmann::json config = testing::tiny_config("llama");
  const auto tensors = testing::tiny_tensors(config);
  testing::write_tiny_model(directory / "model", config, tensors);
  const Checkpoint checkpoint = Checkpoint::open(directory / "model");
  std::vector<WeightSpec> weights;
  for (const LinearModule& module : checkpoint.config().linears())
    weights.push_back(fp8_weight(layer_prefix(1) + module.name, module.n, module.k));
  weights.push_back(plain_weight(layer_prefix(1) + "input_layernorm", {192}, DType::kF32));
  ShardedUnit unit(UnitLayout("block", weights, size()), *group, bench.arena);
  CheckpointSource source(checkpoint);
  unit.load(source, bench.stream);
  gather(unit);

  Arena arena(kHost);
  Stream stream(kHost);
  for (size_t w = 0; w + 1 < weights.size(); ++w) {
    const int64_t n = weights[w].shape[0], k = weights[w].shape[1];
    const std::vector<float> wide = checkpoint.read_f32(weights[w].name + ".weight");
    const Tensor codes = arena.tensor(Category::kWorkspace, "codes", DType::kE4M3, {n, k});
    const Tensor scales = arena.tensor(Category::kWorkspace, "scales", DType::kF32,
                                       gemm_scale_shape(Grouping::k128x128, n, k));
    const Fp8View whole{codes, scales, Grouping::k128x128};
    quantize(&whole, nullptr, ConstView(wide.data(), DType::kF32, {n, k}, kHost), {}, stream);
    const auto* code = codes.view().byte_data();
    const std::vector<std::byte> want(code, code + n * k);
    EXPECT_EQ(bench.download<std::byte>(unit.fp8(w).rowwise().codes), want) << weights[w].name;
    EXPECT_EQ(
        bench.download<float>(unit.fp8(w).rowwise().scales),
        std::vector<float>(scales.as<float>(), scales.as<float>() + scales.shape().elements()))
        << weights[w].name;
  }
  EXPECT_EQ(bench.download<float>(unit.plain(weights.size() - 1)),
            checkpoint.read_f32(weights.back().name + ".weight"))
      << "bf16 widened, cut anywhere";
}

// The two copies of an MX weight are units of their own: each is quantised from the file's values
// once, over any ranks, and cannot be made of the other.
TEST_F(ShardTest, MxCopiesAreShardedApart) {
  const testing::TemporaryDirectory directory;
  const nlohmann::json config = testing::tiny_config("llama");
  testing::write_tiny_model(directory / "model", config, testing::tiny_tensors(config));
  const Checkpoint checkpoint = Checkpoint::open(directory / "model");
  for (const Storage storage : {Storage::kMxRowwise, Storage::kMxColumnwise}) {
    const bool columnwise = storage == Storage::kMxColumnwise;
    std::vector<WeightSpec> weights{plain_weight(layer_prefix(1) + "input_layernorm", {192})};
    for (const LinearModule& module : checkpoint.config().linears()) {
      weights.push_back({layer_prefix(1) + module.name,
                         columnwise ? Shape{module.k, module.n} : Shape{module.n, module.k},
                         storage, DType::kE4M3});
    }
    ShardedUnit unit(UnitLayout("block", weights, size()), *group, bench.arena);
    EXPECT_EQ(now(columnwise ? Category::kColumnwise : Category::kRowwiseShard),
              unit.layout().shard_bytes());
    CheckpointSource source(checkpoint);
    unit.load(source, bench.stream);
    for (int pass = 0; pass < 2; ++pass) {
      gather(unit);
      for (size_t w = 1; w < weights.size(); ++w) {
        const int64_t n = weights[w].shape[columnwise ? 1 : 0];
        const int64_t k = weights[w].shape[columnwise ? 0 : 1];
        const std::vector<float> wide = checkpoint.read_f32(weights[w].name + ".weight");
        Arena arena(kHost);
        Stream stream(kHost);
        const Tensor codes =
            arena.tensor(Category::kWorkspace, "codes", DType::kE4M3, weights[w].shape);
        const Tensor scales = arena.tensor(
            Category::kWorkspace, "scales", DType::kE8M0,
            gemm_scale_shape(Grouping::kMx1x32, weights[w].shape[0], weights[w].shape[1]));
        const Fp8View whole{codes, scales, Grouping::kMx1x32};
        quantize(columnwise ? nullptr : &whole, columnwise ? &whole : nullptr,
                 ConstView(wide.data(), DType::kF32, {n, k}, kHost), {}, stream);
        Fp8Matrix& matrix = unit.fp8(static_cast<int>(w));
        EXPECT_EQ(matrix.usage(), (Usage{!columnwise, columnwise}));
        const ConstFp8View got = columnwise ? matrix.columnwise() : matrix.rowwise();
        const auto bytes_of = [](const Tensor& tensor) {
          const auto* data = reinterpret_cast<const uint8_t*>(tensor.view().byte_data());
          return std::vector<uint8_t>(data, data + tensor.view().bytes());
        };
        EXPECT_EQ(bench.download<uint8_t>(got.codes), bytes_of(codes)) << weights[w].name;
        EXPECT_EQ(bench.download<uint8_t>(got.scales), bytes_of(scales)) << weights[w].name;
        EXPECT_THROW(matrix.update_usage(true, true, bench.ctx), UsageError)
            << "the other copy cannot be made";
      }
      unit.drop_columnwise();  // of copies that can be made again: none here
      unit.reshard();
    }
    unit.drop();
    EXPECT_FALSE(unit.loaded());
    EXPECT_EQ(bench.arena.total().now, 0);
    EXPECT_THROW(unit.gather(communication), UsageError);
    unit.load(source, bench.stream);
    gather(unit);
    EXPECT_EQ(unit.fp8(1).usage(), (Usage{!columnwise, columnwise}));
    unit.reshard();
  }
}

// A model of units of different sizes, with a tied head and a backward that stops at block 2: what
// it computes is whether every unit in use holds its bytes.
class SchedulerTest : public ShardTest {
 protected:
  static constexpr int kBlocks = 4;

  SchedulerTest() {
    for (smaller = 2; smaller < size() && size() % smaller != 0;)
      ++smaller;
    if (size() > 1) {
      std::vector<int> ranks;
      for (int i = 0; i < smaller; ++i)
        ranks.push_back(rank() / smaller * smaller + i);
      regather = world().communicator("regather", ranks);
    }
    std::vector<ShardedUnit*> pointers;
    for (int i = 0; i <= kBlocks; ++i) {
      const std::string name = message("unit ", i);
      layouts.push_back(i == 0 ? UnitLayout(name, {plain_weight(name + ".table", {50, 33})}, size())
                               : UnitLayout(name,
                                            {fp8_weight(name + ".up", 128 + 40 * i, 160),
                                             plain_weight(name + ".norm", {33})},
                                            size()));
      units.push_back(
          std::make_unique<ShardedUnit>(layouts.back(), *group, bench.arena, regather.get()));
      pointers.push_back(units.back().get());
      wanted.push_back(gathered_bytes(layouts.back()));
      units.back()->load(source, bench.stream);
    }
    scheduler = std::make_unique<UsageScheduler>(pointers, bench.stream);
    group->reset_wire_bytes();
    bench.arena.reset_peak();
  }

  static std::vector<UnitUse> training_uses() {
    std::vector<UnitUse> uses = forward_uses();
    uses.push_back({0, Pass::kBackward});
    for (int i = kBlocks; i >= 2; --i)
      uses.push_back({i, Pass::kBackward});
    return uses;
  }
  static std::vector<UnitUse> forward_uses() {
    std::vector<UnitUse> uses;
    for (int i = 0; i <= kBlocks; ++i)
      uses.push_back({i, Pass::kForward});
    uses.push_back({0, Pass::kForward});
    return uses;
  }
  UsagePlan plan(ReshardMode mode, int prefetch, Phase phase = Phase::kTraining,
                 Follows follows = Follows::kNothing, bool keep = false) const {
    return UsagePlan::make(phase, phase == Phase::kTraining ? training_uses() : forward_uses(),
                           kBlocks + 1, {mode, prefetch, smaller, keep}, follows);
  }

  /// Runs the plan, or leaves it by an exception before the end of use `stop`.
  void run(const UsagePlan& plan, int stop = -1) {
    scheduler->begin(plan);
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const UnitUse use = plan.steps[i].use;
      ShardedUnit& unit = scheduler->acquire(use.unit, use.pass);
      EXPECT_EQ(bytes(unit), wanted[use.unit]) << "use " << i;
      // Scratch that is freed while later units are gathered: poison for whoever reads it.
      bench.arena.allocate(Category::kWorkspace, "scratch", layouts[use.unit].gathered_bytes());
      if (static_cast<int>(i) == stop)
        throw std::runtime_error("stopped");
      scheduler->release(use.unit, use.pass);
    }
    scheduler->finish();
  }

  /// Bytes a rank receives for the plan's gathers, over the whole group or the smaller one, when
  /// the units in `there` are there.
  int64_t wire_bytes(const UsagePlan& plan, bool of_smaller = false,
                     std::set<int> there = {}) const {
    // A unit's first gather is over the whole group, a second one of the slices that are left.
    std::vector<bool> sliced(layouts.size(), false);
    for (const PlanStep& step : plan.steps)
      sliced[step.use.unit] = sliced[step.use.unit] || step.to_group;
    std::vector<bool> before(layouts.size(), false);
    for (const int unit : there)
      before[unit] = true;
    int64_t total = 0;
    for (const int unit : testing::gathers_of(plan, there)) {
      const bool again = before[unit] && sliced[unit];
      before[unit] = !again;
      const int ranks = again ? smaller : size();
      if (again == of_smaller)
        total += layouts[unit].gathered_bytes() / ranks * (ranks - 1);
    }
    return total;
  }
  int64_t all_units() const {
    int64_t total = 0;
    for (const UnitLayout& layout : layouts)
      total += size() == 1 ? 0 : layout.gathered_bytes();
    return total;
  }
  void expect_all_sharded() const {
    EXPECT_EQ(now(Category::kGathered), 0);
    for (const auto& unit : units) {
      EXPECT_FALSE(unit->gathered()) << unit->name();
      EXPECT_FALSE(unit->gathering()) << unit->name();
    }
  }

  KnownSource source;
  int smaller = 0;                         // ranks of the regather group, which divides all
  std::unique_ptr<Communicator> regather;  // with more than one rank
  std::vector<UnitLayout> layouts;
  std::vector<std::unique_ptr<ShardedUnit>> units;
  std::vector<std::vector<uint8_t>> wanted;
  std::unique_ptr<UsageScheduler> scheduler;
};

TEST_F(SchedulerTest, TransientAndWireAreThePlans) {
  for (const ReshardMode mode : {ReshardMode::kTrue, ReshardMode::kFalse, ReshardMode::kGroup}) {
    if (mode == ReshardMode::kGroup && size() == 1)
      continue;
    for (const int prefetch : {0, 1, 2, 7}) {
      for (const Phase phase : {Phase::kTraining, Phase::kValidation}) {
        SCOPED_TRACE(message(to_string(mode), " prefetch ", prefetch, " ", to_string(phase)));
        const UsagePlan planned = plan(mode, prefetch, phase);
        bench.arena.reset_peak();
        group->reset_wire_bytes();
        if (regather)
          regather->reset_wire_bytes();
        run(planned);
        EXPECT_EQ(peak(Category::kGathered), planned.peak_gathered(layouts));
        EXPECT_EQ(group->wire_bytes(), wire_bytes(planned));
        if (regather) {
          EXPECT_EQ(regather->wire_bytes(), wire_bytes(planned, true));
        }
        expect_all_sharded();
      }
    }
  }
}

// Passes that follow each other: the first units of the next are on their way when one ends, the
// peak is the plan's, and after the last nothing is left.
TEST_F(SchedulerTest, FirstGathersOfTheNextPassBeginInThisOne) {
  for (const ReshardMode mode : {ReshardMode::kTrue, ReshardMode::kFalse, ReshardMode::kGroup}) {
    if (mode == ReshardMode::kGroup && size() == 1)
      continue;
    for (const int prefetch : {0, 1, 2, 7}) {
      for (const Phase phase : {Phase::kTraining, Phase::kValidation}) {
        SCOPED_TRACE(message(to_string(mode), " prefetch ", prefetch, " ", to_string(phase)));
        const UsagePlan followed = plan(mode, prefetch, phase, Follows::kStep);
        std::set<int> there;
        for (int pass = 0; pass < 3; ++pass) {
          bench.arena.reset_peak();
          group->reset_wire_bytes();
          const int64_t wire = wire_bytes(followed, false, there);
          run(followed);
          testing::gathers_of(followed, there);
          EXPECT_EQ(there, std::set<int>(followed.opening.begin(), followed.opening.end()));
          EXPECT_EQ(there.size(), prefetch == 0 ? 0u : std::min(prefetch + 1, kBlocks + 1));
          int64_t left = 0;
          for (const int unit : there)
            left += layouts[unit].transient_bytes();
          EXPECT_EQ(now(Category::kGathered), left);
          EXPECT_EQ(peak(Category::kGathered), followed.peak_gathered(layouts));
          EXPECT_EQ(group->wire_bytes(), wire) << "pass " << pass;
        }
        const UsagePlan last = plan(mode, prefetch, phase);
        bench.arena.reset_peak();
        group->reset_wire_bytes();
        run(last);
        EXPECT_EQ(group->wire_bytes(), wire_bytes(last, false, there));
        EXPECT_LE(peak(Category::kGathered), followed.peak_gathered(layouts));
        expect_all_sharded();
      }
    }
  }
}

// What was announced does not come: another phase, another mode, a failure, or nothing at all.
TEST_F(SchedulerTest, WhatWasLeftForAPassThatDoesNotComeGoes) {
  const UsagePlan followed = plan(ReshardMode::kTrue, 2, Phase::kTraining, Follows::kStep);
  run(followed);
  run(plan(ReshardMode::kTrue, 2, Phase::kValidation));
  expect_all_sharded();
  run(followed);
  run(plan(ReshardMode::kFalse, 0));
  expect_all_sharded();
  run(followed);
  run(UsagePlan::make(Phase::kInference, {{3, Pass::kForward}}, kBlocks + 1, {}));
  expect_all_sharded();
  run(followed);
  EXPECT_THROW(run(followed, 2), std::runtime_error);
  scheduler->abort();
  expect_all_sharded();
  run(followed);
  scheduler->drop_left();
  expect_all_sharded();
  run(followed);
  run(plan(ReshardMode::kResident, 2));
  EXPECT_EQ(now(Category::kGathered), all_units());
  run(followed);
  scheduler.reset();
  expect_all_sharded();
}

// Micro-batches of a step, keeping units: each is gathered once, and stays until the last one's
// backward.
TEST_F(SchedulerTest, KeptOverAccumulation) {
  for (const int prefetch : {0, 1, 2}) {
    SCOPED_TRACE(prefetch);
    std::set<int> there;
    int64_t wire = 0;
    const auto pass = [&](Follows follows) {
      const UsagePlan planned =
          plan(ReshardMode::kFalse, prefetch, Phase::kTraining, follows, true);
      EXPECT_EQ(planned.peak_gathered(layouts), all_units());
      wire += wire_bytes(planned, false, there);
      testing::gathers_of(planned, there);
      run(planned);
      EXPECT_EQ(group->wire_bytes(), wire);
      int64_t left = 0;
      for (const int unit : there)
        left += layouts[unit].transient_bytes();
      EXPECT_EQ(now(Category::kGathered), left);
    };
    group->reset_wire_bytes();
    const int64_t once = all_units() / size() * (size() - 1);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      pass(Follows::kMicroBatch);
      EXPECT_EQ(wire, once);
      EXPECT_EQ(now(Category::kGathered), all_units());
    }
    pass(Follows::kStep);
    EXPECT_EQ(there.size(), prefetch == 0 ? 0u : prefetch + 1u) << "as without keeping";
    pass(Follows::kMicroBatch);
    pass(Follows::kNothing);
    expect_all_sharded();
  }
  EXPECT_THROW(plan(ReshardMode::kTrue, 1, Phase::kTraining, Follows::kMicroBatch, true),
               LogicError);
}

TEST_F(SchedulerTest, ResidentGathersOnceForTheRun) {
  const UsagePlan training = plan(ReshardMode::kResident, 1);
  const UsagePlan validation = plan(ReshardMode::kResident, 1, Phase::kValidation);
  for (int step = 0; step < 3; ++step) {
    run(training);
    run(validation);
    EXPECT_EQ(now(Category::kGathered), all_units());
  }
  EXPECT_EQ(peak(Category::kGathered), training.peak_gathered(layouts));
  EXPECT_EQ(group->wire_bytes(), all_units() / size() * (size() - 1));
}

TEST_F(SchedulerTest, OneFp8ByteAParameterOnTheWire) {
  // Blocks only, forward: what travels is the codes, not the two bytes a bf16 copy would take.
  std::vector<UnitUse> uses;
  int64_t parameters = 0;
  for (int i = 1; i <= kBlocks; ++i) {
    uses.push_back({i, Pass::kForward});
    for (const WeightSpec& weight : layouts[i].weights())
      parameters += weight.elements();
  }
  run(UsagePlan::make(Phase::kInference, uses, kBlocks + 1, {ReshardMode::kTrue, 1}));
  const double share = static_cast<double>(size() - 1) / size();
  EXPECT_GE(group->wire_bytes(), share * parameters);
  EXPECT_LE(group->wire_bytes(), 1.05 * share * parameters);
}

TEST_F(SchedulerTest, ModesFollowEachOther) {
  const ReshardMode modes[] = {ReshardMode::kTrue,  ReshardMode::kResident, ReshardMode::kFalse,
                               ReshardMode::kGroup, ReshardMode::kResident, ReshardMode::kTrue};
  for (const ReshardMode mode : modes) {
    if (mode == ReshardMode::kGroup && size() == 1)
      continue;
    bench.arena.reset_peak();
    run(plan(mode, 1));
    EXPECT_EQ(now(Category::kGathered), mode == ReshardMode::kResident ? all_units() : 0);
  }
  EXPECT_EQ(peak(Category::kGathered), all_units()) << "the resident units were there at the start";
}

TEST_F(SchedulerTest, UseOutOfOrderIsRefusedBeforeAnyCollective) {
  const UsagePlan planned = plan(ReshardMode::kTrue, 1);
  EXPECT_THROW(scheduler->acquire(0, Pass::kForward), LogicError) << "no plan";
  EXPECT_THROW(scheduler->finish(), LogicError);
  scheduler->begin(planned);
  const int64_t issued = group->issued();
  EXPECT_THROW(scheduler->begin(planned), LogicError);
  EXPECT_THROW(scheduler->acquire(1, Pass::kForward), LogicError) << "another unit";
  EXPECT_THROW(scheduler->acquire(0, Pass::kBackward), LogicError) << "another pass";
  EXPECT_THROW(scheduler->release(0, Pass::kForward), LogicError) << "never acquired";
  EXPECT_EQ(group->issued(), issued);
  scheduler->acquire(0, Pass::kForward);  // gathers unit 0, and unit 1 ahead
  const int64_t two = size() == 1 ? 0 : 2;
  EXPECT_EQ(group->issued(), issued + two);
  EXPECT_THROW(scheduler->acquire(0, Pass::kForward), LogicError) << "not released";
  EXPECT_THROW(scheduler->release(1, Pass::kForward), LogicError) << "another unit";
  EXPECT_THROW(scheduler->finish(), LogicError) << "too early";
  try {
    scheduler->release(0, Pass::kForward);
    scheduler->acquire(3, Pass::kForward);
    FAIL();
  } catch (const LogicError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("unit 3 in forward, but use 1 of the plan is unit unit 1 in forward"),
              std::string::npos)
        << text;
  }
  EXPECT_EQ(group->issued(), issued + two);
  scheduler->abort();
  expect_all_sharded();
  run(planned);
}

TEST_F(SchedulerTest, AbortLeavesNothingAndTheNextStepWorks) {
  for (const ReshardMode mode : {ReshardMode::kTrue, ReshardMode::kFalse, ReshardMode::kGroup}) {
    if (mode == ReshardMode::kGroup && size() == 1)
      continue;
    for (const int prefetch : {0, 2}) {
      const UsagePlan planned = plan(mode, prefetch);
      for (int stop = 0; stop < static_cast<int>(planned.steps.size()); ++stop) {
        SCOPED_TRACE(message(to_string(mode), " prefetch ", prefetch, " stopped in use ", stop));
        EXPECT_THROW(run(planned, stop), std::runtime_error);
        scheduler->abort();
        expect_all_sharded();
        bench.arena.reset_peak();
        run(planned);
        EXPECT_EQ(peak(Category::kGathered), planned.peak_gathered(layouts));
        expect_all_sharded();
      }
    }
  }
}

TEST_F(SchedulerTest, AbortKeepsResidentUnits) {
  const UsagePlan planned = plan(ReshardMode::kResident, 1);
  EXPECT_THROW(run(planned, 3), std::runtime_error);
  scheduler->abort();
  EXPECT_EQ(now(Category::kGathered), all_units());
  const int64_t issued = group->issued();
  run(planned);
  EXPECT_EQ(group->issued(), issued);
}

TEST_F(SchedulerTest, SliceOfTheSmallerGroupComesAndGoes) {
  if (size() == 1)
    GTEST_SKIP() << "a group needs at least 2 ranks";
  ShardedUnit& unit = *units[1];
  const int64_t whole = layouts[1].gathered_bytes();
  gather(unit);
  unit.reshard_to_group(bench.stream);
  EXPECT_EQ(now(Category::kGathered), whole / smaller);
  EXPECT_FALSE(unit.gathered());
  EXPECT_FALSE(unit.at_shard());
  EXPECT_THROW(unit.fp8(0), UsageError);
  const int64_t issued = group->issued();
  regather->reset_wire_bytes();
  gather(unit);
  EXPECT_EQ(now(Category::kGathered), whole) << "the slice is gone";
  EXPECT_EQ(bytes(unit), wanted[1]);
  EXPECT_EQ(group->issued(), issued) << "over the smaller group only";
  EXPECT_EQ(regather->wire_bytes(), whole / smaller * (smaller - 1));
  unit.reshard_to_group(bench.stream);
  unit.gather(communication);
  unit.reshard();  // a gather nobody used
  EXPECT_EQ(now(Category::kGathered), 0);
  EXPECT_TRUE(unit.at_shard());
}

TEST_F(SchedulerTest, InferenceDropsTheColumnwiseCopies) {
  const auto train = [&] {
    const UsagePlan planned = plan(ReshardMode::kTrue, 1);
    scheduler->begin(planned);
    for (const PlanStep& step : planned.steps) {
      ShardedUnit& unit = scheduler->acquire(step.use.unit, step.use.pass);
      if (step.use.unit > 0 && step.use.pass == Pass::kBackward)
        unit.fp8(0).update_usage(std::nullopt, true, bench.ctx);
      scheduler->release(step.use.unit, step.use.pass);
    }
    scheduler->finish();
    return now(Category::kColumnwise);
  };
  const int64_t kept = train();
  EXPECT_GT(kept, 0);
  run(plan(ReshardMode::kTrue, 1, Phase::kValidation));
  EXPECT_EQ(now(Category::kColumnwise), kept) << "validation leaves them";
  run(plan(ReshardMode::kTrue, 1, Phase::kInference));
  EXPECT_EQ(now(Category::kColumnwise), 0);
  EXPECT_EQ(train(), kept) << "and training makes them again";
}

TEST_F(SchedulerTest, ColumnwiseCopiesStayOverReshardAndGoWithRelease) {
  run(plan(ReshardMode::kTrue, 1));
  const UsagePlan planned = plan(ReshardMode::kTrue, 1);
  for (const bool keep : {true, false}) {
    scheduler->begin(planned);
    for (const PlanStep& step : planned.steps) {
      ShardedUnit& unit = scheduler->acquire(step.use.unit, step.use.pass);
      if (step.use.unit > 0 && step.use.pass == Pass::kBackward) {
        unit.fp8(0).update_usage(std::nullopt, true, bench.ctx);
        if (!keep)
          unit.fp8(0).update_usage(std::nullopt, false, bench.ctx);
      }
      scheduler->release(step.use.unit, step.use.pass);
    }
    scheduler->finish();
    int64_t columnwise = 0;
    for (int i = 2; i <= kBlocks; ++i)
      columnwise += layouts[i].weights()[0].bytes();
    EXPECT_EQ(now(Category::kColumnwise), keep ? columnwise : 0);
    EXPECT_EQ(now(Category::kGathered), 0);
  }
}

}  // namespace
}  // namespace rowshard
