#include "finetune/generate.h"

#include <algorithm>

#include "finetune/options_text.h"
#include "finetune/token_file.h"
#include "layers/embedding.h"

namespace rowshard {

std::unique_ptr<AdapterSet> adapters_from(Job& job, const std::filesystem::path& directory) {
  const Adapter adapter = read_adapter(directory);
  auto set = std::make_unique<AdapterSet>(job.config(), adapter.config, job.data_size(),
                                          job.model().options().activations, 0, job.context(),
                                          job.model().slice());
  set->load(adapter, job.context());
  return set;
}

std::vector<int32_t> run_generate(World& world, const GenerateOptions& options,
                                  const std::vector<int32_t>& prompt) {
  check(options);
  Job job(world, options.model, options.execution, Recompute::kNone, to_text(options));
  const ModelConfig& config = job.config();
  check_ids(prompt, config.vocab_size);
  const int64_t longest = static_cast<int64_t>(prompt.size()) + options.max_new_tokens;
  ROWSHARD_CHECK(longest <= config.max_position_embeddings, ConfigError, "a prompt of ",
                 prompt.size(), " ids and --max-new-tokens ", options.max_new_tokens,
                 " exceed the model's ", config.max_position_embeddings, " positions");
  std::unique_ptr<AdapterSet> adapters;
  if (!options.adapter.empty())
    adapters = adapters_from(job, options.adapter);
  job.load();

  Context& ctx = job.context();
  std::vector<int32_t> ids = prompt;
  Tensor logits =
      job.arena().tensor(Category::kActivations, "logits", DType::kF32, {1, config.vocab_size});
  std::vector<float> host(config.vocab_size);
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    const int32_t length = static_cast<int32_t>(ids.size());
    std::vector<int32_t> padded = ids, bounds{0, length};
    padded.resize(round_up(length, job.pad_multiple()), 0);
    if (padded.size() > ids.size())
      bounds.push_back(static_cast<int32_t>(padded.size()));
    const DeviceBatch batch =
        job.model().batch(padded, std::vector<int32_t>(padded.size(), kIgnoreLabel), bounds);
    Tensor row = job.arena().tensor(Category::kActivations, "row", DType::kI32, {1});
    const int32_t last = length - 1;
    copy(row, ConstView(&last, DType::kI32, {1}, kHost), ctx.stream);
    job.model().logits(batch, adapters.get(), row, logits);
    copy(View(host.data(), DType::kF32, logits.shape(), kHost), logits, ctx.stream);
    ctx.stream.synchronize();
    const int32_t next =
        static_cast<int32_t>(std::max_element(host.begin(), host.end()) - host.begin());
    if (std::count(config.eos_token_ids.begin(), config.eos_token_ids.end(), next))
      break;
    ids.push_back(next);
  }
  return std::vector<int32_t>(ids.begin() + static_cast<int64_t>(prompt.size()), ids.end());
}

}  // namespace rowshard
