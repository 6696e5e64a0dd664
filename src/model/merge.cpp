#include "model/merge.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "model/checkpoint.h"
#include "model/checkpoint_writer.h"
#include "model/peft_adapter.h"

namespace rowshard {

namespace fs = std::filesystem;

namespace {

// Rows at once: enough to keep reads large, few enough to keep memory small.
constexpr int64_t kRows = 256;

/// Adds scale x B A to `rows` rows of W that begin at `first`, in f32, and rounds to bf16.
class Merger {
 public:
  void add(const AdapterModule& module, int64_t r, float scale, int64_t first,
           const std::vector<float>& w, std::vector<bf16>& merged) {
    const int64_t k = module.in;
    const auto rows = static_cast<int64_t>(w.size()) / k;
    double moved = 0, asked = 0;
#pragma omp parallel for reduction(+ : moved, asked)
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<float> update(k, 0.0f);
      const float* b = &module.b[(first + row) * r];
      for (int64_t j = 0; j < r; ++j) {
        const float* a = &module.a[j * k];
        for (int64_t col = 0; col < k; ++col)
          update[col] += b[j] * a[col];
      }
      for (int64_t col = 0; col < k; ++col) {
        const float delta = scale * update[col], before = w[row * k + col];
        merged[row * k + col] = bf16(before + delta);
        moved += static_cast<double>(static_cast<float>(merged[row * k + col]) - before) * delta;
        asked += static_cast<double>(delta) * delta;
      }
    }
    moved_ += moved;
    asked_ += asked;
  }
  double kept() const {
    return asked_ > 0 ? moved_ / asked_ : 1;
  }

 private:
  double moved_ = 0, asked_ = 0;
};

bool is_float(const TensorInfo& info) {
  return info.tag == "F32" || info.tag == "F16" || info.tag == "BF16";
}

}  // namespace

MergeSummary merge_checkpoint(const fs::path& base_path, const fs::path& adapter_path,
                              const fs::path& destination, const MergeOptions& options) {
  const Checkpoint base = Checkpoint::open(base_path);
  const Adapter adapter = read_adapter(adapter_path);
  const ModelConfig& config = base.config();

  std::map<std::string, const AdapterModule*> updates;  // weight -> module
  for (const AdapterModule& module : adapter.modules)
    updates[module.module + ".weight"] = &module;
  std::set<std::string> linears;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const LinearModule& linear : config.linears()) {
      linears.insert(layer_prefix(layer) + linear.name + ".weight");
    }
  }
  for (const auto& [weight, module] : updates) {
    ROWSHARD_CHECK(
        linears.count(weight) != 0, ConfigError, adapter_path.string(), ": module ", module->module,
        " is no linear layer of ", base_path.string(), "; the adapter belongs to another base (",
        adapter.config.base_model.empty() ? "not named" : adapter.config.base_model, ")");
    const TensorInfo& info = base.tensors().at(weight);
    ROWSHARD_CHECK(info.dims[0] == module->out && info.dims[1] == module->in, ConfigError,
                   adapter_path.string(), ": module ", module->module, " adapts a weight [",
                   module->out, ", ", module->in, "], and that of ", base_path.string(), " is ",
                   info.describe(), "; the adapter belongs to another base");
  }

  MergeSummary summary;
  std::vector<std::vector<TensorSpec>> groups;
  for (const std::string& name : base.tensors().names()) {
    const TensorInfo& info = base.tensors().at(name);
    summary.bytes_in += info.bytes;
    const bool is_scale = name.ends_with("_scale_inv");  // paired with its weight by Checkpoint
    if (is_scale)
      continue;
    const bool becomes_bf16 = is_float(info) || info.tag == "F8_E4M3";
    groups.push_back({{name, becomes_bf16 ? "BF16" : info.tag, info.dims}});
  }

  CheckpointWriter writer(destination, groups, options.max_shard_bytes);
  Merger merger;
  for (const auto& group : groups) {
    const std::string& name = group.front().name;
    const TensorInfo& info = base.tensors().at(name);
    const auto update = updates.find(name);
    if (update == updates.end() && info.tag == group.front().tag) {
      copy_tensor(base.tensors(), name, writer);
      ++summary.kept;
      continue;
    }
    const int64_t all = info.dims.empty() ? 1 : info.dims[0];
    for (int64_t first = 0; first < all; first += kRows) {
      const int64_t rows = std::min(kRows, all - first);
      const std::vector<float> wide = base.read_rows_dequantized(name, first, rows);
      std::vector<bf16> narrow(wide.size());
      if (update != updates.end()) {
        merger.add(*update->second, adapter.config.r, static_cast<float>(adapter.config.scale()),
                   first, wide, narrow);
      } else {
        std::transform(wide.begin(), wide.end(), narrow.begin(),
                       [](float value) { return bf16(value); });
      }
      writer.write(name, narrow.data(), static_cast<int64_t>(narrow.size() * sizeof(bf16)));
    }
    ++summary.converted;
  }
  auto json = read_config_for_edit(base_path);
  json.erase("quantization_config");
  json[json.contains("dtype") ? "dtype" : "torch_dtype"] = "bfloat16";
  writer.finish(base_path, json);
  summary.bytes_out = writer.bytes();
  summary.files = writer.files();
  summary.update_kept = merger.kept();
  return summary;
}

}  // namespace rowshard
