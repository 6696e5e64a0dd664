#include "model/decoder_slice.h"

#include <algorithm>

namespace rowshard {

namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kPlainStep = 16;  // keeps rows of 16-bit elements on 32-byte borders

/// Elements between two places where the FFN may be cut.
int64_t ffn_step(const ModelConfig& config, Storage linear, int ranks) {
  if (linear == Storage::kFp8Block)
    return kBlock;
  return config.intermediate_size >= kPlainStep * ranks ? kPlainStep : 1;
}

/// Why the model cannot be cut over so many ranks; empty when it can.
std::string obstacle(const ModelConfig& config, Storage linear, int ranks) {
  if (ranks == 1)
    return "";
  if (config.heads % ranks != 0)
    return message(config.heads, " attention heads do not divide by ", ranks);
  const bool replicated = config.kv_heads < ranks;
  if (replicated ? ranks % config.kv_heads != 0 : config.kv_heads % ranks != 0)
    return message(config.kv_heads, " KV heads neither divide by ", ranks, " nor divide it");
  if (config.vocab_size < ranks)
    return message("a vocabulary of ", config.vocab_size, " is less than one a rank");
  if (linear == Storage::kPlain) {
    return config.intermediate_size < ranks
               ? message("an FFN of ", config.intermediate_size, " is less than one a rank")
               : "";
  }
  const int64_t q_rows = config.heads / ranks * config.head_dim;
  if (q_rows % kBlock != 0)
    return message("a rank's ", q_rows, " query rows are no multiple of the FP8 block of ", kBlock);
  const int64_t kv_rows = (replicated ? 1 : config.kv_heads / ranks) * config.head_dim;
  if (kv_rows % kBlock != 0 && config.kv_heads > 1)
    return message("a rank's ", kv_rows, " key rows are no multiple of the FP8 block of ", kBlock);
  const int64_t blocks = ceil_div(config.intermediate_size, kBlock);
  if (blocks < ranks)
    return message("an FFN of ", config.intermediate_size, " has ", blocks, " FP8 blocks");
  return "";
}

}  // namespace

Range near_equal_part(int64_t count, int64_t step, int parts, int part) {
  const int64_t steps = ceil_div(count, step);
  const auto border = [&](int64_t i) {
    return std::min(count, step * (i * (steps / parts) + std::min<int64_t>(i, steps % parts)));
  };
  return {border(part), border(part + 1)};
}

DecoderSlice DecoderSlice::whole(const ModelConfig& config) {
  return {1,
          0,
          {0, config.heads},
          {0, config.kv_heads},
          {0, config.intermediate_size},
          {0, config.vocab_size},
          1,
          Storage::kPlain};
}

DecoderSlice DecoderSlice::make(const ModelConfig& config, Storage linear, int ranks, int rank) {
  if (ranks == 1)
    return whole(config);
  const std::string why = obstacle(config, linear, ranks);
  if (!why.empty()) {
    std::string fitting;
    for (int size = 1; size <= config.heads; ++size) {
      if (obstacle(config, linear, size).empty())
        fitting += (fitting.empty() ? "" : ", ") + std::to_string(size);
    }
    throw ConfigError(message("--tp ", ranks, ": this ", to_string(config.family),
                              " model cannot be cut over ", ranks, " ranks: ", why,
                              "; sizes that work", linear == Storage::kFp8Block ? " in FP8" : "",
                              ": ", fitting));
  }
  DecoderSlice slice;
  slice.ranks = ranks;
  slice.rank = rank;
  slice.linear = linear;
  const int64_t heads = config.heads / ranks;
  slice.heads = {rank * heads, (rank + 1) * heads};
  if (config.kv_heads < ranks) {
    slice.kv_replicas = static_cast<int>(ranks / config.kv_heads);
    const int64_t head = rank / slice.kv_replicas;
    slice.kv_heads = {head, head + 1};
  } else {
    const int64_t kv_heads = config.kv_heads / ranks;
    slice.kv_heads = {rank * kv_heads, (rank + 1) * kv_heads};
  }
  slice.ffn =
      near_equal_part(config.intermediate_size, ffn_step(config, linear, ranks), ranks, rank);
  slice.vocabulary = near_equal_part(
      config.vocab_size, config.vocab_size >= kPlainStep * ranks ? kPlainStep : 1, ranks, rank);
  return slice;
}

std::vector<SlicedLinear> sliced_linears(const ModelConfig& config, const DecoderSlice& slice) {
  const auto rows_of = [&](const Range& heads) {
    return Range{heads.begin * config.head_dim, heads.end * config.head_dim};
  };
  const Range q = rows_of(slice.heads), kv = rows_of(slice.kv_heads);
  const Range hidden{0, config.hidden_size};
  const Range rows[] = {q, kv, kv, hidden, slice.ffn, slice.ffn, hidden};
  const Range cols[] = {hidden, hidden, hidden, q, hidden, hidden, slice.ffn};
  std::vector<SlicedLinear> result;
  for (const LinearModule& module : config.linears()) {
    const size_t i = result.size();
    result.push_back({module, rows[i], cols[i]});
  }
  return result;
}

}  // namespace rowshard
