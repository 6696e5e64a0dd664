#include "finetune/batches.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/error.h"
#include "layers/cross_entropy.h"
#include "unit/model/file_fixture.h"

namespace rowshard::testing {
namespace {

/// `lengths.size()` samples; token = 1000 x sample + position, every third one masked.
class Data {
 public:
  explicit Data(const std::vector<int64_t>& lengths) {
    std::vector<int32_t> ids, labels;
    std::vector<int64_t> offsets{0};
    for (size_t sample = 0; sample < lengths.size(); ++sample) {
      for (int64_t i = 0; i < lengths[sample]; ++i) {
        ids.push_back(static_cast<int32_t>(1000 * sample + i));
        labels.push_back(i % 3 == 2 ? kIgnoreLabel : ids.back());
      }
      offsets.push_back(static_cast<int64_t>(ids.size()));
    }
    const auto count = [](const auto& v) { return std::vector{static_cast<int64_t>(v.size())}; };
    write_tensors(
        directory_ / "t",
        {named("input_ids", "I32", count(ids), ids), named("labels", "I32", count(labels), labels),
         named("sample_offsets", "I64", count(offsets), offsets)},
        {{"format", "rowshard.tokens"}, {"version", "1"}});
    file_.emplace_back(TokenFile::open(directory_ / "t", 1'000'000));
  }
  const TokenFile& file() const { return file_[0]; }

 private:
  TemporaryDirectory directory_;
  std::vector<TokenFile> file_;
};

std::vector<int64_t> some_lengths(int count, int64_t low, int64_t high) {
  std::vector<int64_t> lengths;
  const Philox random{3, 3};
  for (int i = 0; i < count; ++i)
    lengths.push_back(low + random.words(i)[0] % (high - low + 1));
  return lengths;
}

/// Samples of a micro-batch, in order; checks everything that must hold inside one.
std::vector<int64_t> check_batch(const TokenFile& file, const MicroBatch& batch) {
  std::vector<int64_t> samples;
  const int64_t tokens = batch.tokens();
  EXPECT_EQ(batch.labels.size(), static_cast<size_t>(tokens));
  EXPECT_EQ(batch.positions.size(), static_cast<size_t>(tokens));
  EXPECT_EQ(batch.cu_seqlens.front(), 0);
  EXPECT_EQ(batch.cu_seqlens.back(), tokens);
  int64_t valid = 0;
  int32_t longest = 0;
  for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
    const int32_t begin = batch.cu_seqlens[s], end = batch.cu_seqlens[s + 1];
    EXPECT_LT(begin, end);
    longest = std::max(longest, end - begin);
    const bool padding = begin >= tokens - batch.padding;
    const int64_t sample = batch.input_ids[begin] / 1000;
    if (!padding) {
      samples.push_back(sample);
      EXPECT_EQ(end - begin, file.length(sample));
    }
    for (int32_t t = begin; t < end; ++t) {
      EXPECT_EQ(batch.positions[t], t - begin);
      EXPECT_EQ(batch.input_ids[t], padding ? 0 : 1000 * sample + t - begin);
      // The next token of the same sample, if that one is trained.
      const bool trained = !padding && t + 1 < end && (t + 1 - begin) % 3 != 2;
      EXPECT_EQ(batch.labels[t], trained ? 1000 * sample + t + 1 - begin : kIgnoreLabel);
      valid += trained;
    }
  }
  EXPECT_EQ(batch.valid_tokens, valid);
  EXPECT_EQ(batch.max_segment, longest);
  return samples;
}

BatchOptions options_of(int64_t seq_len, bool packing, int64_t micro, int64_t accum, int64_t dp) {
  BatchOptions options;
  options.seq_len = seq_len;
  options.packing = packing;
  options.micro_batch_size = micro;
  options.grad_accum = accum;
  options.dp_size = dp;
  options.seed = 11;
  return options;
}

/// Samples of the global batch at `position`, slot by slot.
std::vector<int64_t> global_batch(const Data& data, const Batches& batches, DataPosition position) {
  std::vector<int64_t> samples;
  int64_t valid = 0;
  for (int64_t k = 0; k < batches.options().grad_accum; ++k) {
    for (int64_t rank = 0; rank < batches.options().dp_size; ++rank) {
      const MicroBatch batch = batches.micro_batch(position, rank, k);
      for (int64_t sample : check_batch(data.file(), batch))
        samples.push_back(sample);
      valid += batch.valid_tokens;
    }
  }
  EXPECT_EQ(batches.valid_tokens(position), valid);
  return samples;
}

TEST(Batches, EveryEpochUsesEverySampleOnceInItsOwnOrder) {
  for (bool packing : {false, true}) {
    const Data data(some_lengths(50, 2, 30));
    const Batches batches(data.file(), options_of(32, packing, 1, 1, 1), 64);
    std::vector<std::vector<int64_t>> orders;
    DataPosition position;
    for (int64_t epoch = 0; epoch < 4; ++epoch) {
      std::vector<int64_t> order;
      for (int64_t row = 0; row < batches.rows(epoch); ++row) {
        EXPECT_EQ(position, (DataPosition{epoch, row}));
        const auto samples = global_batch(data, batches, position);
        if (!packing) {
          EXPECT_EQ(samples.size(), 1u);
        }
        int64_t tokens = 0;
        for (int64_t sample : samples)
          tokens += data.file().length(sample);
        EXPECT_LE(tokens, 32);
        order.insert(order.end(), samples.begin(), samples.end());
        position = batches.advance(position);
      }
      EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
      for (const auto& other : orders)
        EXPECT_NE(order, other);
      orders.push_back(order);
      std::sort(order.begin(), order.end());
      std::vector<int64_t> all(50);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(order, all);
    }
  }
}

TEST(Batches, ThePackingIsFirstFit) {
  const Data data({7, 5, 3, 4, 2});
  const Batches batches(data.file(), options_of(10, true, 1, 1, 1), 64);
  const Batches unpacked(data.file(), options_of(10, false, 1, 1, 1), 64);
  std::vector<std::vector<int64_t>> expected;
  std::vector<int64_t> room;
  for (int64_t row = 0; row < 5; ++row) {
    const int64_t sample = global_batch(data, unpacked, {0, row})[0];
    const int64_t length = data.file().length(sample);
    size_t bin = 0;
    while (bin < room.size() && room[bin] < length)
      ++bin;
    if (bin == room.size()) {
      room.push_back(10);
      expected.emplace_back();
    }
    room[bin] -= length;
    expected[bin].push_back(sample);
  }
  ASSERT_EQ(batches.rows(0), static_cast<int64_t>(expected.size()));
  for (size_t row = 0; row < expected.size(); ++row) {
    EXPECT_EQ(global_batch(data, batches, {0, static_cast<int64_t>(row)}), expected[row]);
  }
}

TEST(Batches, TheGlobalBatchDoesNotDependOnHowItIsShared) {
  const Data data(some_lengths(37, 2, 16));
  for (bool packing : {false, true}) {
    const Batches reference(data.file(), options_of(16, packing, 12, 1, 1), 64);
    for (auto [micro, accum, dp] :
         {std::array{1, 12, 1}, {1, 1, 12}, {2, 3, 2}, {3, 2, 2}, {4, 1, 3}, {1, 4, 3}}) {
      const Batches batches(data.file(), options_of(16, packing, micro, accum, dp), 64);
      DataPosition position;
      for (int step = 0; step < 7; ++step) {  // crosses epochs
        EXPECT_EQ(global_batch(data, batches, position), global_batch(data, reference, position));
        EXPECT_EQ(batches.advance(position), reference.advance(position));
        position = batches.advance(position);
      }
      EXPECT_GT(position.epoch, 0);
    }
  }
}

TEST(Batches, APositionIsAllThatResumingNeeds) {
  const Data data(some_lengths(23, 2, 16));
  const Batches one(data.file(), options_of(16, true, 3, 1, 1), 64);
  DataPosition position;
  std::vector<std::vector<int64_t>> seen;
  std::vector<DataPosition> positions;
  for (int step = 0; step < 30; ++step) {
    positions.push_back(position);
    seen.push_back(global_batch(data, one, position));
    position = one.advance(position);
  }
  for (int step : {29, 0, 17, 3}) {
    const Batches fresh(data.file(), options_of(16, true, 3, 1, 1), 64);
    EXPECT_EQ(global_batch(data, fresh, positions[step]), seen[step]);
  }
  const Batches other_seed(
      data.file(),
      [] {
        BatchOptions options = options_of(16, true, 3, 1, 1);
        options.seed = 12;
        return options;
      }(),
      64);
  EXPECT_NE(global_batch(data, other_seed, {}), seen[0]);
}

TEST(Batches, MoreRowsThanTheDataSpansEpochs) {
  const Data data({4, 5, 6});
  const Batches batches(data.file(), options_of(8, false, 2, 2, 2), 64);
  const auto samples = global_batch(data, batches, {});
  ASSERT_EQ(samples.size(), 8u);
  EXPECT_EQ(std::set<int64_t>(samples.begin(), samples.begin() + 3).size(), 3u);
  EXPECT_EQ(std::set<int64_t>(samples.begin() + 3, samples.begin() + 6).size(), 3u);
  EXPECT_EQ(batches.advance({}), (DataPosition{2, 2}));
  EXPECT_EQ(batches.steps_for_epochs(1), 1);
  EXPECT_EQ(batches.steps_for_epochs(2), 1);
  EXPECT_EQ(batches.steps_for_epochs(3), 2);
}

TEST(Batches, LongAndUntrainedSamplesAreDroppedAndCounted) {
  const Data data({4, 9, 8, 1, 20});
  const Batches batches(data.file(), options_of(8, false, 1, 1, 1), 64);
  EXPECT_EQ(batches.usable().samples, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(batches.usable().too_long, 2);
  EXPECT_EQ(batches.usable().untrained, 1);
  const std::string error =
      config_error([&] { Batches(data.file(), options_of(3, false, 1, 1, 1), 64); });
  EXPECT_MENTIONS(error,
                  "none of its 5 samples can be used with --seq-len 3: 4 are longer (up to "
                  "20 tokens), 1 have no trained token");
}

TEST(Batches, PaddingIsSegmentsOfItsOwn) {
  const Data data(some_lengths(12, 2, 16));
  BatchOptions options = options_of(16, true, 2, 1, 1);
  options.pad_multiple = 32;  // = micro_batch_size x seq_len: always the same number of tokens
  const Batches batches(data.file(), options, 64);
  DataPosition position;
  bool padded = false;
  for (int step = 0; step < 10; ++step) {
    const MicroBatch batch = batches.micro_batch(position, 0, 0);
    check_batch(data.file(), batch);
    EXPECT_EQ(batch.tokens(), 32);
    EXPECT_LE(batch.max_segment, 16);
    padded = padded || batch.padding > 0;
    position = batches.advance(position);
  }
  EXPECT_TRUE(padded);
}

TEST(Batches, LabelsWithoutALossMakeUpTheNumberForTheHead) {
  const Data data(some_lengths(12, 2, 16));
  BatchOptions options = options_of(16, true, 2, 1, 1);
  const Batches plain(data.file(), options, 64);
  options.head_multiple = 8;
  const Batches batches(data.file(), options, 64);
  DataPosition position;
  for (int step = 0; step < 10; ++step) {
    const MicroBatch want = plain.micro_batch(position, 0, 0);
    const MicroBatch batch = batches.micro_batch(position, 0, 0);
    EXPECT_EQ(want.head_tokens, want.valid_tokens);
    EXPECT_EQ(batch.head_tokens, std::min(round_up(want.valid_tokens, int64_t{8}), want.tokens()));
    EXPECT_EQ(batch.valid_tokens, want.valid_tokens);
    EXPECT_EQ(std::ranges::count(batch.labels, kNoLoss), batch.head_tokens - batch.valid_tokens);
    std::vector<int32_t> trained = batch.labels;
    std::ranges::replace(trained, kNoLoss, kIgnoreLabel);
    EXPECT_EQ(trained, want.labels);
    position = batches.advance(position);
  }
}

TEST(Batches, OptionsThatCannotRun) {
  const Data data({4, 5});
  const auto error = [&](const BatchOptions& options) {
    return config_error([&] { Batches(data.file(), options, 64); });
  };
  EXPECT_MENTIONS(error(options_of(65, false, 1, 1, 1)), "--seq-len is 65, longer than the 64");
  EXPECT_MENTIONS(error(options_of(1, false, 1, 1, 1)), "--seq-len is 1");
  EXPECT_MENTIONS(error(options_of(8, false, 0, 1, 1)), "--micro-batch-size is 0");
  EXPECT_MENTIONS(error(options_of(8, false, 1, 0, 1)), "--grad-accum is 0");
  EXPECT_MENTIONS(error(options_of(8, false, 1, 1, 0)), "data-parallel ranks is 0");
  EXPECT_MENTIONS(error(options_of(64, false, int64_t{1} << 40, 1, 1)), "more tokens than");
  const Batches batches(data.file(), options_of(8, false, 1, 1, 1), 64);
  EXPECT_MENTIONS(config_error([&] { batches.micro_batch({0, 3}, 0, 0); }), "epoch 0, row 3");
  EXPECT_MENTIONS(config_error([&] { batches.advance({-1, 0}); }), "epoch -1");
  EXPECT_MENTIONS(config_error([&] { batches.steps_for_epochs(0); }), "--epochs is 0");
  EXPECT_THROW(batches.micro_batch({}, 1, 0), LogicError);
  EXPECT_THROW(batches.micro_batch({}, 0, 1), LogicError);
}

TEST(EvalBatches, EverySampleOnceAndTheSameCountOnEveryRank) {
  const Data data(some_lengths(11, 2, 16));
  for (bool packing : {false, true}) {
    for (auto [micro, dp] : {std::pair{1, 1}, {2, 3}, {4, 4}, {1, 16}}) {
      const EvalBatches batches(data.file(), options_of(16, packing, micro, 1, dp), 64);
      std::multiset<int64_t> seen;
      int64_t valid = 0, empty = 0;
      for (int64_t i = 0; i < batches.count(); ++i) {
        for (int64_t rank = 0; rank < dp; ++rank) {
          const MicroBatch batch = batches.micro_batch(i, rank);
          for (int64_t sample : check_batch(data.file(), batch))
            seen.insert(sample);
          valid += batch.valid_tokens;
          empty += batch.tokens() == 0;
        }
      }
      EXPECT_EQ(seen.size(), 11u);
      EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), 11u);
      EXPECT_EQ(batches.valid_tokens(), valid);
      if (dp == 16) {
        EXPECT_GE(empty, 5);
      }
      EXPECT_THROW(batches.micro_batch(batches.count(), 0), LogicError);
    }
  }
}

TEST(EvalBatches, AnEmptyMicroBatchIsPaddedToo) {
  const Data data({4});
  BatchOptions options = options_of(8, false, 1, 1, 2);
  options.pad_multiple = 4;
  const EvalBatches batches(data.file(), options, 64);
  const MicroBatch batch = batches.micro_batch(0, 1);
  EXPECT_EQ(batch.tokens(), 4);
  EXPECT_EQ(batch.padding, 4);
  EXPECT_EQ(batch.valid_tokens, 0);
  options.pad_multiple = 1;
  EXPECT_EQ(EvalBatches(data.file(), options, 64).micro_batch(0, 1).cu_seqlens,
            (std::vector<int32_t>{0}));
}

}  // namespace
}  // namespace rowshard::testing
