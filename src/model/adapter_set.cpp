#include "model/adapter_set.h"

#include <algorithm>
#include <cmath>

namespace rowshard {

namespace {

constexpr int kLinears = 7;
constexpr int64_t kPartAlignment = 64;

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

}  // namespace

std::vector<int> target_indices(const ModelConfig& model, const std::vector<std::string>& targets) {
  const std::vector<LinearModule> linears = model.linears();
  std::vector<int> indices;
  for (const std::string& target : targets) {
    if (target == "all-linear")
      return {0, 1, 2, 3, 4, 5, 6};
    const auto found =
        std::find_if(linears.begin(), linears.end(),
                     [&](const LinearModule& module) { return last_part(module.name) == target; });
    std::string known;
    for (const LinearModule& module : linears)
      known.append(1, ' ').append(last_part(module.name));
    ROWSHARD_CHECK(found != linears.end(), ConfigError,
                   "--target-modules: no linear layer is named ", target, "; this model has", known,
                   ", or use all-linear");
    indices.push_back(static_cast<int>(found - linears.begin()));
  }
  std::sort(indices.begin(), indices.end());
  indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
  ROWSHARD_CHECK(!indices.empty(), ConfigError, "--target-modules is empty; name a linear layer");
  return indices;
}

AdapterSet::AdapterSet(const ModelConfig& model, AdapterConfig config, int ranks, DType activations,
                       uint64_t seed, Context& ctx)
    : config_(std::move(config)) {
  const std::vector<LinearModule> linears = model.linears();
  const std::vector<int> targets = target_indices(model, config_.target_modules);
  config_.target_modules.clear();
  for (int index : targets)
    config_.target_modules.push_back(last_part(linears[index].name));

  const int64_t r = config_.r;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    for (int index : targets) {
      const LinearModule& linear = linears[index];
      Entry entry{layer_prefix(layer) + linear.name, layer,  index, linear.n, linear.k, trainable_,
                  trainable_ + r * linear.k,         nullptr};
      trainable_ += r * (linear.k + linear.n);
      entries_.push_back(std::move(entry));
    }
  }
  count_ = round_up(trainable_, kPartAlignment * ranks);

  parameters_ = ctx.arena.tensor(Category::kAdapter, "adapter.parameters", DType::kF32, {count_});
  gradients_ = ctx.arena.tensor(Category::kAdapter, "adapter.gradients", DType::kF32, {count_});
  if (activations != DType::kF32) {
    compute_ = ctx.arena.tensor(Category::kAdapter, "adapter.compute", activations, {count_});
  }
  std::vector<float> values(count_, 0.0f);
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const float bound = 1.0f / std::sqrt(static_cast<float>(entry.k));
    const Philox random{seed, i};
    for (int64_t j = 0; j < r * entry.k; ++j) {
      values[entry.a_offset + j] = (2.0f * random.uniform(j) - 1.0f) * bound;
    }
  }
  copy(parameters_, ConstView(values.data(), DType::kF32, {count_}, kHost), ctx.stream);
  ctx.stream.synchronize();
  fill_bytes(gradients_, 0, ctx.stream);
  refresh_compute(ctx.stream);

  lookup_.assign(model.layers * kLinears, nullptr);
  const auto part = [](const View& flat, int64_t offset, Shape shape) {
    return flat.slice_rows(offset, shape.elements()).reshape(shape);
  };
  for (Entry& entry : entries_) {
    entry.factors = std::make_unique<LoraFactors>();
    entry.factors->a = part(compute(), entry.a_offset, {r, entry.k});
    entry.factors->b = part(compute(), entry.b_offset, {entry.n, r});
    entry.factors->grad_a = part(gradients(), entry.a_offset, {r, entry.k});
    entry.factors->grad_b = part(gradients(), entry.b_offset, {entry.n, r});
    entry.factors->scale = static_cast<float>(config_.scale());
    lookup_[entry.layer * kLinears + entry.index] = entry.factors.get();
  }
}

const LoraFactors* AdapterSet::factors(int64_t layer, int index) const {
  return lookup_[layer * kLinears + index];
}

void AdapterSet::refresh_compute(Stream& stream) {
  if (compute_)
    convert(compute_, parameters_, stream);
}

void AdapterSet::load(const Adapter& adapter, Context& ctx) {
  ROWSHARD_CHECK(adapter.config.r == config_.r, ConfigError, "the adapter has rank ",
                 adapter.config.r, ", this run ", config_.r);
  ROWSHARD_CHECK(adapter.modules.size() == entries_.size(), ConfigError, "the adapter has ",
                 adapter.modules.size(), " modules, this model and target list ", entries_.size());
  std::vector<float> values(count_, 0.0f);
  for (const Entry& entry : entries_) {
    const AdapterModule* module = adapter.find(entry.module);
    ROWSHARD_CHECK(module, ConfigError, "the adapter has no factors for ", entry.module);
    ROWSHARD_CHECK(module->in == entry.k && module->out == entry.n, ConfigError, entry.module,
                   ": the adapter is for [", module->out, ", ", module->in, "], the model has [",
                   entry.n, ", ", entry.k, "]; is it another base model's?");
    std::copy(module->a.begin(), module->a.end(), values.begin() + entry.a_offset);
    std::copy(module->b.begin(), module->b.end(), values.begin() + entry.b_offset);
  }
  copy(parameters_, ConstView(values.data(), DType::kF32, {count_}, kHost), ctx.stream);
  ctx.stream.synchronize();
  refresh_compute(ctx.stream);
}

void AdapterSet::save(const std::filesystem::path& directory, Context& ctx) const {
  std::vector<float> values(count_);
  copy(View(values.data(), DType::kF32, {count_}, kHost), parameters_, ctx.stream);
  ctx.stream.synchronize();
  std::vector<AdapterTensor> tensors;
  for (const Entry& entry : entries_) {
    tensors.push_back(
        {entry.module, ConstView(&values[entry.a_offset], DType::kF32, {config_.r, entry.k}, kHost),
         ConstView(&values[entry.b_offset], DType::kF32, {entry.n, config_.r}, kHost)});
  }
  write_adapter(directory, config_, tensors);
}

}  // namespace rowshard
