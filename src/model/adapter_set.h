// All adapters of a model as one flat vector of parameters, so that the reduction, the clip and the
// optimiser are one operation each.
//
//   parameters  f32 [count]  the master factors: A then B of every adapted linear, in model order
//   compute     T [count]    the factors in the dtype of the activations (the same memory for f32)
//   gradients   f32 [count]
//
// `count` is padded with zeros to equal parts of 64 elements a rank, so that the vector can be
// reduce-scattered; padding never changes. Replicated over the ranks; owned here.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/lora.h"
#include "model/hf_config.h"
#include "model/peft_adapter.h"

namespace rowshard {

class AdapterSet {
 public:
  /// Adapts every linear whose name ends in one of `config.target_modules` ("q_proj", …), or all
  /// with {"all-linear"}; ConfigError for a target the model does not have. `ranks` that share the
  /// optimiser. Initial values as in PEFT: A uniform in ±1/sqrt(in), B zero, a pure function of
  /// (seed, module).
  AdapterSet(const ModelConfig& model, AdapterConfig config, int ranks, DType activations,
             uint64_t seed, Context& ctx);

  const AdapterConfig& config() const { return config_; }
  int64_t count() const { return count_; }          // padded
  int64_t trainable() const { return trainable_; }  // without padding
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
  /// Calls write_adapter with host copies of the factors.
  void save(const std::filesystem::path& directory, Context& ctx) const;

 private:
  struct Entry {
    std::string module;
    int64_t layer;
    int index;
    int64_t n, k;
    int64_t a_offset, b_offset;
    std::unique_ptr<LoraFactors> factors;
  };

  AdapterConfig config_;
  int64_t count_ = 0, trainable_ = 0, lowest_block_ = 0;
  std::vector<Entry> entries_;
  std::vector<const LoraFactors*> lookup_;  // [layers, 7]
  Tensor parameters_, compute_, gradients_;
};

/// Which of the seven linears a target list names, by index; ConfigError names an unknown target.
std::vector<int> target_indices(const ModelConfig& model, const std::vector<std::string>& targets);

}  // namespace rowshard
