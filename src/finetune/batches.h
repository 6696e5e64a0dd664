// Which samples a step trains on: a pure function of (data, options, position).
//
// Each epoch orders the samples by a Philox shuffle of (seed, epoch) and cuts them into rows: one
// sample a row, or with packing, first-fit bins of at most seq_len tokens. The rows of all epochs
// form one endless sequence; a global batch is the next `rows_per_step` of it, and may cross an
// epoch's end. Slot (accumulation k, rank r) takes rows [(k x dp_size + r) x micro_batch_size, +
// micro_batch_ size) of the global batch, so a global batch has the same rows however ranks and
// accumulation share it. A DataPosition names the first row not yet used and is all that resuming
// needs.
//
// There is no padding inside: a micro-batch is its rows' samples, concatenated, as segments of a
// variable-length attention. Labels are shifted here, before any split of the sequence: label[t] is
// the token after t within the same segment. Errors: ConfigError with the option or file to change.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "finetune/token_file.h"

namespace rowshard {

struct MicroBatch {
  std::vector<int32_t> input_ids;   // [tokens]
  std::vector<int32_t> labels;      // [tokens], shifted; -100, or kNoLoss, where nothing is trained
  std::vector<int32_t> positions;   // [tokens], from 0 in every segment
  std::vector<int32_t> cu_seqlens;  // [segments + 1], from 0 to tokens
  int64_t valid_tokens = 0;         // labels that are trained
  int64_t head_tokens = 0;          // those and labels that are kNoLoss
  int64_t padding = 0;              // tokens added at the end by pad_multiple
  int32_t max_segment = 0;          // longest segment

  int64_t tokens() const { return static_cast<int64_t>(input_ids.size()); }
};

struct BatchOptions {
  int64_t seq_len = 2048;  // longest row; longer samples are dropped and counted
  bool packing = false;
  int64_t micro_batch_size = 1;  // rows a micro-batch
  int64_t grad_accum = 1;
  int64_t dp_size = 1;  // data-parallel ranks
  uint64_t seed = 0;
  /// The tokens of a micro-batch are padded up to a multiple of this (sequence parallelism,
  /// kernels), as segments of their own with id 0 and label -100. With micro_batch_size x seq_len
  /// every micro-batch has the same number of tokens (CUDA graphs). 1: no padding.
  int64_t pad_multiple = 1;
  /// Labels that are not trained become kNoLoss until those that go through the head are a multiple
  /// of this, or all. 1: none.
  int64_t head_multiple = 1;

  int64_t rows_per_step() const { return micro_batch_size * grad_accum * dp_size; }
};

struct DataPosition {
  int64_t epoch = 0;
  int64_t row = 0;  // in the epoch's order
  bool operator==(const DataPosition&) const = default;
};

/// The samples of a file that can be used with a seq_len.
struct UsableSamples {
  std::vector<int64_t> samples;  // indices, in file order
  std::vector<int32_t> trained;  // by index in the file: trained labels after the shift
  int64_t too_long = 0;          // dropped: longer than seq_len
  int64_t untrained = 0;         // dropped: no label is left after the shift
};

class Batches {
 public:
  /// The file must outlive this. max_position: the model's max_position_embeddings.
  Batches(const TokenFile& file, const BatchOptions& options, int64_t max_position);
  ~Batches();
  Batches(Batches&&) noexcept;
  Batches& operator=(Batches&&) noexcept;

  const BatchOptions& options() const { return options_; }
  int64_t samples() const { return static_cast<int64_t>(usable_.samples.size()); }  // an epoch
  const UsableSamples& usable() const { return usable_; }  // what was dropped, for the log
  int64_t rows(int64_t epoch) const;
  /// Steps until every sample was used `epochs` times; the last one may reach into the next epoch.
  int64_t steps_for_epochs(int64_t epochs) const;

  /// One rank's micro-batch `accumulation` of the global batch that begins at `position`.
  MicroBatch micro_batch(DataPosition position, int64_t rank, int64_t accumulation) const;
  /// Trained labels of the whole global batch: what the loss is divided by, known without a
  /// collective.
  int64_t valid_tokens(DataPosition position) const;
  /// The position after one global batch.
  DataPosition advance(DataPosition position) const;

 private:
  struct Epoch;
  const Epoch& epoch(int64_t index) const;
  /// The row `offset` rows after `position`, in whichever epoch it is.
  DataPosition locate(DataPosition position, int64_t offset) const;

  const TokenFile* file_;
  BatchOptions options_;
  UsableSamples usable_;
  mutable std::vector<std::unique_ptr<Epoch>> cache_;  // the last few used
};

/// Validation: file order, every usable sample exactly once, the same number of micro-batches on
/// every rank (some are empty at the end). options.grad_accum and seed are not used.
class EvalBatches {
 public:
  EvalBatches(const TokenFile& file, const BatchOptions& options, int64_t max_position);

  int64_t count() const;  // micro-batches a rank
  const UsableSamples& usable() const { return usable_; }
  MicroBatch micro_batch(int64_t index, int64_t rank) const;
  int64_t valid_tokens() const { return valid_tokens_; }  // of all

 private:
  const TokenFile* file_;
  BatchOptions options_;
  UsableSamples usable_;
  std::vector<std::vector<int64_t>> rows_;
  int64_t valid_tokens_ = 0;
};

}  // namespace rowshard
