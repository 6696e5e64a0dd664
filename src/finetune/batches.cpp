#include "finetune/batches.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "core/rng.h"
#include "core/view.h"
#include "layers/cross_entropy.h"

namespace rowshard {

namespace {

using Rows = std::vector<std::vector<int64_t>>;  // sample indices of each row

// Philox streams of the shuffle: one an epoch, apart from those of other uses.
constexpr uint64_t kShuffleStream = uint64_t{0x73687566} << 32;
// A step that crosses an epoch's end reads two; evaluation of the step count reads them in turn.
constexpr size_t kCachedEpochs = 3;

UsableSamples usable_samples(const TokenFile& file, const BatchOptions& options,
                             int64_t max_position) {
  const auto at_least_one = [](int64_t value, const char* option) {
    ROWSHARD_CHECK(value >= 1, ConfigError, option, " is ", value, ", and must be at least 1");
  };
  at_least_one(options.micro_batch_size, "--micro-batch-size");
  at_least_one(options.grad_accum, "--grad-accum");
  at_least_one(options.dp_size, "the number of data-parallel ranks");
  at_least_one(options.pad_multiple, "the padding multiple");
  at_least_one(options.head_multiple, "the multiple of labels");
  ROWSHARD_CHECK(options.seq_len >= 2, ConfigError, "--seq-len is ", options.seq_len,
                 ", and must be at least 2: the first token predicts the second");
  ROWSHARD_CHECK(options.seq_len <= max_position, ConfigError, "--seq-len is ", options.seq_len,
                 ", longer than the ", max_position, " positions of the model");
  ROWSHARD_CHECK(options.micro_batch_size <= std::numeric_limits<int32_t>::max() / 2 /
                                                 std::max(options.seq_len, options.pad_multiple),
                 ConfigError, "--micro-batch-size ", options.micro_batch_size, " x --seq-len ",
                 options.seq_len, " are more tokens than one micro-batch can have");
  UsableSamples usable;
  usable.trained.resize(file.samples());
  int64_t longest = 0;
  for (int64_t sample = 0; sample < file.samples(); ++sample) {
    const auto labels = file.labels(sample).subspan(1);  // nothing predicts the first token
    usable.trained[sample] = static_cast<int32_t>(
        std::count_if(labels.begin(), labels.end(), [](int32_t l) { return l != kIgnoreLabel; }));
    longest = std::max(longest, file.length(sample));
    if (file.length(sample) > options.seq_len) {
      ++usable.too_long;
    } else if (usable.trained[sample] == 0) {
      ++usable.untrained;
    } else {
      usable.samples.push_back(sample);
    }
  }
  ROWSHARD_CHECK(!usable.samples.empty(), ConfigError, file.name(), ": none of its ",
                 file.samples(), " samples can be used with --seq-len ", options.seq_len, ": ",
                 usable.too_long, " are longer (up to ", longest, " tokens), ", usable.untrained,
                 " have no trained token; raise --seq-len, or prepare the data with --max-length");
  return usable;
}

/// First-fit: each sample goes to the first row that has room. A tree of maxima finds it in
/// O(log rows).
Rows pack(const TokenFile& file, const std::vector<int64_t>& order, int64_t seq_len) {
  const size_t leaves = std::bit_ceil(order.size());
  std::vector<int64_t> room(2 * leaves, seq_len);  // node i has children 2i and 2i + 1
  Rows rows;
  for (int64_t sample : order) {
    const int64_t length = file.length(sample);
    size_t node = 1;
    while (node < leaves)
      node = room[2 * node] >= length ? 2 * node : 2 * node + 1;
    const size_t row = node - leaves;
    if (row == rows.size())
      rows.emplace_back();
    rows[row].push_back(sample);
    room[node] -= length;
    for (node /= 2; node >= 1; node /= 2)
      room[node] = std::max(room[2 * node], room[2 * node + 1]);
  }
  return rows;
}

Rows make_rows(const TokenFile& file, const std::vector<int64_t>& order,
               const BatchOptions& options) {
  if (options.packing)
    return pack(file, order, options.seq_len);
  Rows rows;
  for (int64_t sample : order)
    rows.push_back({sample});
  return rows;
}

class Builder {
 public:
  Builder(const TokenFile& file, const BatchOptions& options) : file_(file), options_(options) {
    batch_.cu_seqlens.push_back(0);
  }

  void add(const std::vector<int64_t>& row) {
    for (int64_t sample : row) {
      const auto ids = file_.input_ids(sample);
      const auto labels = file_.labels(sample);
      batch_.input_ids.insert(batch_.input_ids.end(), ids.begin(), ids.end());
      for (size_t i = 1; i < labels.size(); ++i) {
        batch_.labels.push_back(labels[i]);
        if (labels[i] != kIgnoreLabel)
          ++batch_.valid_tokens;
      }
      batch_.labels.push_back(kIgnoreLabel);  // the last token predicts nothing
      end_segment(static_cast<int64_t>(ids.size()));
    }
  }

  MicroBatch finish() {
    const int64_t multiple = options_.pad_multiple;
    if (multiple > 1) {
      const int64_t wanted = std::max(multiple, round_up(batch_.tokens(), multiple));
      batch_.padding = wanted - batch_.tokens();
      // No segment is longer than a row may be, so that positions stay those of the model.
      for (int64_t left = batch_.padding; left > 0;) {
        const int64_t length = std::min(left, options_.seq_len);
        batch_.input_ids.resize(batch_.input_ids.size() + length, 0);
        batch_.labels.resize(batch_.labels.size() + length, kIgnoreLabel);
        end_segment(length);
        left -= length;
      }
    }
    const int64_t wanted = round_up(batch_.valid_tokens, options_.head_multiple);
    batch_.head_tokens = batch_.valid_tokens;
    for (int64_t i = 0; i < batch_.tokens() && batch_.head_tokens < wanted; ++i) {
      if (batch_.labels[i] != kIgnoreLabel)
        continue;
      batch_.labels[i] = kNoLoss;
      ++batch_.head_tokens;
    }
    return std::move(batch_);
  }

 private:
  void end_segment(int64_t length) {
    for (int64_t i = 0; i < length; ++i)
      batch_.positions.push_back(static_cast<int32_t>(i));
    batch_.cu_seqlens.push_back(static_cast<int32_t>(batch_.tokens()));
    batch_.max_segment = std::max(batch_.max_segment, static_cast<int32_t>(length));
  }

  const TokenFile& file_;
  const BatchOptions& options_;
  MicroBatch batch_;
};

}  // namespace

struct Batches::Epoch {
  int64_t index = 0;
  Rows rows;
};

Batches::Batches(const TokenFile& file, const BatchOptions& options, int64_t max_position)
    : file_(&file), options_(options), usable_(usable_samples(file, options, max_position)) {}
Batches::~Batches() = default;
Batches::Batches(Batches&&) noexcept = default;
Batches& Batches::operator=(Batches&&) noexcept = default;

const Batches::Epoch& Batches::epoch(int64_t index) const {
  ROWSHARD_CHECK(index >= 0, LogicError, "epoch ", index);
  for (size_t i = 0; i < cache_.size(); ++i) {
    if (cache_[i]->index != index)
      continue;
    std::rotate(cache_.begin() + i, cache_.begin() + i + 1, cache_.end());  // now the newest
    return *cache_.back();
  }
  // Fisher and Yates, from the end: element i changes places with one of 0 … i.
  std::vector<int64_t> order = usable_.samples;
  const Philox random{options_.seed, kShuffleStream + static_cast<uint64_t>(index)};
  for (size_t i = order.size() - 1; i > 0; --i) {
    const auto words = random.words(i);
    const uint64_t draw = uint64_t{words[1]} << 32 | words[0];
    // The upper half of draw x (i + 1) is uniform in 0 … i up to 2^-64 x i.
    __extension__ using Wide = unsigned __int128;
    std::swap(order[i], order[static_cast<size_t>((Wide{draw} * (i + 1)) >> 64)]);
  }
  auto made = std::make_unique<Epoch>();
  made->index = index;
  made->rows = make_rows(*file_, order, options_);
  if (cache_.size() == kCachedEpochs)
    cache_.erase(cache_.begin());
  cache_.push_back(std::move(made));
  return *cache_.back();
}

int64_t Batches::rows(int64_t index) const {
  // Without packing it is known without a shuffle.
  return options_.packing ? static_cast<int64_t>(epoch(index).rows.size()) : samples();
}

int64_t Batches::steps_for_epochs(int64_t epochs) const {
  ROWSHARD_CHECK(epochs >= 1, ConfigError, "--epochs is ", epochs, ", and must be at least 1");
  int64_t total = 0;
  for (int64_t i = 0; i < epochs; ++i)
    total += rows(i);
  return ceil_div(total, options_.rows_per_step());
}

DataPosition Batches::locate(DataPosition position, int64_t offset) const {
  ROWSHARD_CHECK(position.epoch >= 0 && position.row >= 0 && position.row <= rows(position.epoch),
                 ConfigError, "data position epoch ", position.epoch, ", row ", position.row,
                 " is not in ", file_->name(), " (", rows(std::max<int64_t>(0, position.epoch)),
                 " rows); resume with the data and options of the first run");
  position.row += offset;
  while (position.row >= rows(position.epoch)) {
    position.row -= rows(position.epoch);
    ++position.epoch;
  }
  return position;
}

MicroBatch Batches::micro_batch(DataPosition position, int64_t rank, int64_t accumulation) const {
  ROWSHARD_CHECK(rank >= 0 && rank < options_.dp_size && accumulation >= 0 &&
                     accumulation < options_.grad_accum,
                 LogicError, "micro-batch of rank ", rank, " of ", options_.dp_size,
                 ", accumulation ", accumulation, " of ", options_.grad_accum);
  Builder builder(*file_, options_);
  const int64_t first = (accumulation * options_.dp_size + rank) * options_.micro_batch_size;
  DataPosition row = locate(position, first);
  for (int64_t i = 0; i < options_.micro_batch_size; ++i) {
    builder.add(epoch(row.epoch).rows[row.row]);
    row = locate(row, 1);
  }
  return builder.finish();
}

int64_t Batches::valid_tokens(DataPosition position) const {
  int64_t total = 0;
  DataPosition row = locate(position, 0);
  for (int64_t i = 0; i < options_.rows_per_step(); ++i) {
    for (int64_t sample : epoch(row.epoch).rows[row.row])
      total += usable_.trained[sample];
    row = locate(row, 1);
  }
  return total;
}

DataPosition Batches::advance(DataPosition position) const {
  return locate(position, options_.rows_per_step());
}

EvalBatches::EvalBatches(const TokenFile& file, const BatchOptions& options, int64_t max_position)
    : file_(&file),
      options_(options),
      usable_(usable_samples(file, options, max_position)),
      rows_(make_rows(file, usable_.samples, options)) {
  for (int64_t sample : usable_.samples)
    valid_tokens_ += usable_.trained[sample];
}

int64_t EvalBatches::count() const {
  return ceil_div(static_cast<int64_t>(rows_.size()), options_.micro_batch_size * options_.dp_size);
}

MicroBatch EvalBatches::micro_batch(int64_t index, int64_t rank) const {
  ROWSHARD_CHECK(index >= 0 && index < count() && rank >= 0 && rank < options_.dp_size, LogicError,
                 "evaluation micro-batch ", index, " of ", count(), ", rank ", rank, " of ",
                 options_.dp_size);
  Builder builder(*file_, options_);
  const int64_t first = (index * options_.dp_size + rank) * options_.micro_batch_size;
  const auto all = static_cast<int64_t>(rows_.size());
  const int64_t end = std::min(first + options_.micro_batch_size, all);
  for (int64_t row = first; row < end; ++row)
    builder.add(rows_[row]);
  return builder.finish();
}

}  // namespace rowshard
