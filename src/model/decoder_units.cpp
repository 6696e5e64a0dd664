#include "model/decoder_units.h"

namespace rowshard {

namespace {

/// Rows and columns of a checkpoint's [rows, cols] tensor; the slice says nothing when it is whole.
TensorSlice slice_of(int64_t rows, int64_t cols, const Range& held_rows, const Range& held_cols) {
  if (held_rows.size() == rows && held_cols.size() == cols)
    return {};
  return {rows, cols, held_rows.begin, held_cols.begin};
}

}  // namespace

DecoderUnits::DecoderUnits(const ModelConfig& config, const DecoderSlice& slice, Storage linear,
                           DType activations, int ranks)
    : layers_(config.layers),
      tied_(config.tie_word_embeddings),
      mx_(linear == Storage::kMxRowwise) {
  const auto plain = [](std::string name, Shape shape, DType dtype) {
    return WeightSpec{std::move(name), shape, Storage::kPlain, dtype};
  };
  const auto vocabulary_rows = [&](std::string name) {
    return WeightSpec{
        std::move(name),
        {slice.vocabulary.size(), config.hidden_size},
        Storage::kPlain,
        DType::kBF16,
        false,
        slice_of(config.vocab_size, config.hidden_size, slice.vocabulary, {0, config.hidden_size})};
  };
  std::vector<WeightSpec> embedding{vocabulary_rows("model.embed_tokens")};
  const WeightSpec final_norm = plain("model.norm", {config.hidden_size}, activations);
  if (tied_) {
    embedding.push_back(final_norm);
    final_norm_ = 1;
    head_matrix_ = 0;
  }
  layouts_.emplace_back(tied_ ? "embedding+head" : "embedding", std::move(embedding), ranks);

  const DType linear_dtype = linear == Storage::kPlain ? DType::kBF16 : DType::kE4M3;
  const auto block_unit = [&](int64_t layer, Storage storage, BlockIndices& indices) {
    const std::string prefix = layer_prefix(layer);
    const bool columnwise = storage == Storage::kMxColumnwise;
    std::vector<WeightSpec> weights;
    const auto add = [&weights](WeightSpec spec) {
      weights.push_back(std::move(spec));
      return static_cast<int>(weights.size()) - 1;
    };
    indices.input_norm = add(plain(prefix + "input_layernorm", {config.hidden_size}, activations));
    indices.post_norm =
        add(plain(prefix + "post_attention_layernorm", {config.hidden_size}, activations));
    if (config.qk_norm) {
      indices.q_norm = add(plain(prefix + "self_attn.q_norm", {config.head_dim}, activations));
      indices.k_norm = add(plain(prefix + "self_attn.k_norm", {config.head_dim}, activations));
    }
    int i = 0;
    for (const SlicedLinear& held : sliced_linears(config, slice)) {
      const LinearModule& module = held.whole;
      const std::string name = prefix + module.name;
      const Shape shape = columnwise ? Shape{held.k(), held.n()} : Shape{held.n(), held.k()};
      indices.linear[i] = add(WeightSpec{name, shape, storage, linear_dtype, false,
                                         slice_of(module.n, module.k, held.rows, held.cols)});
      // A bias is a weight of its own; its name ends in ".bias" and is read as such. Backward does
      // not read it.
      indices.bias[i] = -1;
      if (module.bias && !columnwise) {
        WeightSpec bias = plain(name + ".bias", {held.n()}, activations);
        bias.slice = slice_of(module.n, 1, held.rows, {0, 1});
        indices.bias[i] = add(std::move(bias));
      }
      ++i;
    }
    layouts_.emplace_back(message("block ", layer, columnwise ? " columnwise" : ""),
                          std::move(weights), ranks);
  };
  for (int64_t layer = 0; layer < config.layers; ++layer)
    block_unit(layer, linear, block_);
  if (!tied_) {
    final_norm_ = 0;
    head_matrix_ = 1;
    layouts_.emplace_back("head", std::vector<WeightSpec>{final_norm, vocabulary_rows("lm_head")},
                          ranks);
  }
  first_columnwise_ = count();
  if (mx_) {
    for (int64_t layer = 0; layer < config.layers; ++layer)
      block_unit(layer, Storage::kMxColumnwise, columnwise_);
  }
}

std::vector<UnitUse> DecoderUnits::forward_uses() const {
  std::vector<UnitUse> uses{{embedding(), Pass::kForward}};
  for (int64_t layer = 0; layer < layers_; ++layer)
    uses.push_back({block(layer), Pass::kForward});
  uses.push_back({head(), Pass::kForward});
  return uses;
}

std::vector<UnitUse> DecoderUnits::training_uses(int64_t lowest_block, bool recompute) const {
  std::vector<UnitUse> uses = forward_uses();
  uses.push_back({head(), Pass::kBackward});
  for (int64_t layer = layers_ - 1; layer >= lowest_block; --layer) {
    if (mx_ && recompute)
      uses.push_back({block(layer), Pass::kBackward});
    uses.push_back({backward_block(layer), Pass::kBackward});
  }
  return uses;
}

}  // namespace rowshard
