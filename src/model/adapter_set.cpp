#include "model/adapter_set.h"

#include <algorithm>
#include <cmath>

namespace rowshard {

namespace {

constexpr int kLinears = 7;  // in the order of ModelConfig::linears()
constexpr int kAttentionKey = 1, kAttentionValue = 2, kAttentionOut = 3;
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

template <typename F>
void AdapterSet::for_each_row(const Factor& factor, F&& call) {
  const int64_t cols = factor.held_cols.size();
  for (int64_t row = 0; row < factor.held_rows.size(); ++row) {
    call(factor.full_offset + (factor.held_rows.begin + row) * factor.cols + factor.held_cols.begin,
         factor.offset + row * cols, cols);
  }
}

std::vector<AdapterSet::Entry> AdapterSet::lay_out(const ModelConfig& model,
                                                   const DecoderSlice& slice,
                                                   const std::vector<int>& targets) {
  const std::vector<SlicedLinear> linears = sliced_linears(model, slice);
  const int64_t r = config_.r;
  std::vector<Entry> entries;
  trainable_ = 0;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    for (int index : targets) {
      const SlicedLinear& linear = linears[index];
      Entry entry{layer_prefix(layer) + linear.whole.name, layer, index, {}, {}, nullptr};
      entry.a = {r, linear.whole.k, {0, r}, linear.cols};
      entry.b = {linear.whole.n, r, linear.rows, {0, r}};
      entry.a.full_offset = trainable_;
      entry.b.full_offset = trainable_ + r * linear.whole.k;
      trainable_ += r * (linear.whole.k + linear.whole.n);
      entries.push_back(std::move(entry));
    }
  }
  int64_t next = 0;
  const auto place = [&](Factor& factor) {
    factor.offset = next;
    next += factor.held();
  };
  if (slice.ranks == 1) {
    for (Entry& entry : entries) {
      place(entry.a);
      place(entry.b);
    }
    return entries;
  }
  // By whom a factor is shared with: all tp ranks, neighbours with the same KV heads, nobody.
  const auto is_row_parallel = [](const Entry& entry) {
    return entry.index == kLinears - 1 || entry.index == kAttentionOut;
  };
  const auto has_shared_kv = [&](const Entry& entry) {
    return slice.kv_replicas > 1 &&
           (entry.index == kAttentionKey || entry.index == kAttentionValue);
  };
  for (Entry& entry : entries)
    place(is_row_parallel(entry) ? entry.b : entry.a);
  replicated_ = next;
  for (Entry& entry : entries) {
    if (has_shared_kv(entry))
      place(entry.b);
  }
  kv_replicated_ = next;
  for (Entry& entry : entries) {
    if (is_row_parallel(entry)) {
      place(entry.a);
    } else if (!has_shared_kv(entry)) {
      place(entry.b);
    }
  }
  return entries;
}

AdapterSet::AdapterSet(const ModelConfig& model, AdapterConfig config, int ranks, DType activations,
                       uint64_t seed, Context& ctx, const DecoderSlice& slice)
    : config_(std::move(config)), slice_(slice.ranks == 1 ? DecoderSlice::whole(model) : slice) {
  const std::vector<LinearModule> linears = model.linears();
  const std::vector<int> targets = target_indices(model, config_.target_modules);
  config_.target_modules.clear();
  for (int index : targets)
    config_.target_modules.push_back(last_part(linears[index].name));

  // Every tp rank's vector is as long as the longest, so that all are cut and summed alike.
  for (int rank = 0; rank < slice_.ranks; ++rank) {
    entries_of_ranks_.push_back(
        lay_out(model, slice_.ranks == 1 ? slice_ : slice_.of(model, rank), targets));
    for (const Entry& entry : entries_of_ranks_.back()) {
      count_ = std::max({count_, entry.a.offset + entry.a.held(), entry.b.offset + entry.b.held()});
    }
  }
  count_ = round_up(count_, kPartAlignment * ranks);
  entries_ = lay_out(model, slice_, targets);

  parameters_ = ctx.arena.tensor(Category::kAdapter, "adapter.parameters", DType::kF32, {count_});
  gradients_ = ctx.arena.tensor(Category::kAdapter, "adapter.gradients", DType::kF32, {count_});
  if (activations != DType::kF32) {
    compute_ = ctx.arena.tensor(Category::kAdapter, "adapter.compute", activations, {count_});
  }
  std::vector<float> values(count_, 0.0f);
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Factor& a = entries_[i].a;
    const float bound = 1.0f / std::sqrt(static_cast<float>(a.cols));
    const Philox random{seed, i};
    for_each_row(a, [&](int64_t full, int64_t local, int64_t cols) {
      for (int64_t j = 0; j < cols; ++j)
        values[local + j] = (2.0f * random.uniform(full - a.full_offset + j) - 1.0f) * bound;
    });
  }
  copy(parameters_, ConstView(values.data(), DType::kF32, {count_}, kHost), ctx.stream);
  ctx.stream.synchronize();
  fill_bytes(gradients_, 0, ctx.stream);
  refresh_compute(ctx.stream);

  lookup_.assign(model.layers * kLinears, nullptr);
  const auto part = [](const View& flat, const Factor& factor) {
    const Shape shape{factor.held_rows.size(), factor.held_cols.size()};
    return flat.slice_rows(factor.offset, shape.elements()).reshape(shape);
  };
  for (Entry& entry : entries_) {
    entry.factors = std::make_unique<LoraFactors>();
    entry.factors->a = part(compute(), entry.a);
    entry.factors->b = part(compute(), entry.b);
    entry.factors->grad_a = part(gradients(), entry.a);
    entry.factors->grad_b = part(gradients(), entry.b);
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
  std::vector<float> full(trainable_, 0.0f);
  for (const Entry& entry : entries_) {
    const AdapterModule* module = adapter.find(entry.module);
    ROWSHARD_CHECK(module, ConfigError, "the adapter has no factors for ", entry.module);
    ROWSHARD_CHECK(module->in == entry.a.cols && module->out == entry.b.rows, ConfigError,
                   entry.module, ": the adapter is for [", module->out, ", ", module->in,
                   "], the model has [", entry.b.rows, ", ", entry.a.cols,
                   "]; is it another base model's?");
    std::copy(module->a.begin(), module->a.end(), full.begin() + entry.a.full_offset);
    std::copy(module->b.begin(), module->b.end(), full.begin() + entry.b.full_offset);
  }
  const std::vector<float> values = cut(full);
  copy(parameters_, ConstView(values.data(), DType::kF32, {count_}, kHost), ctx.stream);
  ctx.stream.synchronize();
  refresh_compute(ctx.stream);
}

void AdapterSet::save(const std::filesystem::path& directory,
                      const std::vector<float>& full) const {
  ROWSHARD_CHECK(static_cast<int64_t>(full.size()) == trainable_, LogicError, "a full vector of ",
                 full.size(), " adapter parameters, not ", trainable_);
  std::vector<AdapterTensor> tensors;
  for (const Entry& entry : entries_) {
    const auto whole = [&](const Factor& factor) {
      return ConstView(&full[factor.full_offset], DType::kF32, {factor.rows, factor.cols}, kHost);
    };
    tensors.push_back({entry.module, whole(entry.a), whole(entry.b)});
  }
  write_adapter(directory, config_, tensors);
}

std::vector<float> AdapterSet::assemble(const std::vector<float>& flats) const {
  ROWSHARD_CHECK(static_cast<int64_t>(flats.size()) == slice_.ranks * count_, LogicError,
                 "flat vectors of ", flats.size(), " elements, not ", slice_.ranks, " x ", count_);
  std::vector<float> full(trainable_);
  for (int rank = 0; rank < slice_.ranks; ++rank) {
    const float* flat = flats.data() + rank * count_;
    for (const Entry& entry : entries_of_ranks_[rank]) {
      for (const Factor* factor : {&entry.a, &entry.b}) {
        for_each_row(*factor, [&](int64_t to, int64_t from, int64_t cols) {
          std::copy_n(flat + from, cols, full.data() + to);
        });
      }
    }
  }
  return full;
}

std::vector<float> AdapterSet::cut(const std::vector<float>& full) const {
  ROWSHARD_CHECK(static_cast<int64_t>(full.size()) == trainable_, LogicError, "a full vector of ",
                 full.size(), " adapter parameters, not ", trainable_);
  std::vector<float> flat(count_, 0.0f);
  for (const Entry& entry : entries_) {
    for (const Factor* factor : {&entry.a, &entry.b}) {
      for_each_row(*factor, [&](int64_t from, int64_t to, int64_t cols) {
        std::copy_n(full.data() + from, cols, flat.data() + to);
      });
    }
  }
  return flat;
}

}  // namespace rowshard
