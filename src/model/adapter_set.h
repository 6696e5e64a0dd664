// All adapters of a model as one flat vector of parameters, so that the reduction, the clip and the
// optimiser are one operation each.
//
//   parameters  f32 [count]  the master factors: A then B of every adapted linear, in model order
//   compute     T [count]    the factors in the dtype of the activations (the same memory for f32)
//   gradients   f32 [count]
//
// `count` is padded with zeros to equal parts of 64 elements a rank, so that the vector can be
// reduce-scattered; padding never changes. Replicated over the data-parallel ranks; owned here.
//
// Under tensor parallelism a rank holds its slice of the factors that are cut with their weights (B
// of a column-parallel layer, A of a row-parallel one) and the others whole. The flat vector is
// then ordered by who else holds the same factor, and has the same borders on every tp rank:
//
//   [0, replicated)                 on every tp rank
//   [replicated, kv_replicated)     B of k and v where several neighbours hold the same KV heads
//   [kv_replicated, count)          on this tp rank alone
//
// `full` vectors hold every factor once and whole, in the order of one rank: what is saved.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/lora.h"
#include "model/decoder_slice.h"
#include "model/peft_adapter.h"

namespace rowshard {

class AdapterSet {
 public:
  /// Adapts every linear whose name ends in one of `config.target_modules` ("q_proj", …), or all
  /// with {"all-linear"}; ConfigError for a target the model does not have. `ranks` that share the
  /// optimiser. Initial values as in PEFT: A uniform in ±1/sqrt(in), B zero, a pure function of
  /// (seed, module). `slice` is what this tensor-parallel rank holds: parts of the same values.
  AdapterSet(const ModelConfig& model, AdapterConfig config, int ranks, DType activations,
             uint64_t seed, Context& ctx, const DecoderSlice& slice = {});

  const AdapterConfig& config() const { return config_; }
  int64_t count() const { return count_; }          // of this rank's flat vector, padded
  int64_t trainable() const { return trainable_; }  // of a full vector
  int64_t replicated() const { return replicated_; }
  int64_t kv_replicated() const { return kv_replicated_; }
  const DecoderSlice& slice() const { return slice_; }
  int64_t lowest_block() const { return lowest_block_; }

  /// Factors of linear `index` (order of ModelConfig::linears()) in a layer; null when not adapted.
  const LoraFactors* factors(int64_t layer, int index) const;

  const View& parameters() const { return parameters_.view(); }
  const View& gradients() const { return gradients_.view(); }
  const View& compute() const { return compute_ ? compute_.view() : parameters_.view(); }
  /// Rounds `parameters` to the compute dtype; after every change of the parameters.
  void refresh_compute(Stream& stream);

  /// Overwrites the parameters with a PEFT adapter's; ConfigError when modules or ranks differ.
  void load(const Adapter& adapter, Context& ctx);
  /// Calls write_adapter with the factors of a full vector.
  void save(const std::filesystem::path& directory, const std::vector<float>& full) const;

  /// The full vector from the flat vectors of all tp ranks, [tp][count] in rank order.
  std::vector<float> assemble(const std::vector<float>& flats) const;
  /// This rank's flat vector of a full one; padding is zero.
  std::vector<float> cut(const std::vector<float>& full) const;

 private:
  /// A factor: the whole is [rows, cols]; of it [held_rows, held_cols] are in the flat vector.
  struct Factor {
    int64_t rows, cols;
    Range held_rows, held_cols;
    int64_t full_offset = 0, offset = 0;
    int64_t held() const { return held_rows.size() * held_cols.size(); }
  };
  struct Entry {
    std::string module;
    int64_t layer;
    int index;
    Factor a, b;
    std::unique_ptr<LoraFactors> factors;
  };
  /// The entries as tp rank `slice.rank` holds them, with offsets; sets the borders.
  std::vector<Entry> lay_out(const ModelConfig& model, const DecoderSlice& slice,
                             const std::vector<int>& targets);
  template <typename F>
  static void for_each_row(const Factor& factor, F&& call);

  AdapterConfig config_;
  DecoderSlice slice_;
  int64_t count_ = 0, trainable_ = 0, lowest_block_ = 0;
  int64_t replicated_ = 0, kv_replicated_ = 0;
  std::vector<Entry> entries_;                        // of this rank
  std::vector<std::vector<Entry>> entries_of_ranks_;  // by tp rank; for assemble
  std::vector<const LoraFactors*> lookup_;            // [layers, 7]
  Tensor parameters_, compute_, gradients_;
};

/// Which of the seven linears a target list names, by index; ConfigError names an unknown target.
std::vector<int> target_indices(const ModelConfig& model, const std::vector<std::string>& targets);

}  // namespace rowshard
