#include "model/quantize_checkpoint.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "core/arena.h"
#include "fp8/quantize.h"
#include "model/checkpoint.h"
#include "model/checkpoint_writer.h"

namespace rowshard {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

// A scale belongs to 128 rows, so bands of whole blocks can be quantised one by one.
constexpr int64_t kBand = 128;

void check_finite(const std::vector<float>& values, const std::string& name, int64_t first_row,
                  int64_t cols) {
  for (size_t i = 0; i < values.size(); ++i) {
    ROWSHARD_CHECK(std::isfinite(values[i]), ConfigError, "weight ", name, " has the value ",
                   values[i], " at [", first_row + static_cast<int64_t>(i) / cols, ", ",
                   static_cast<int64_t>(i) % cols,
                   "]; FP8 cannot hold it, the checkpoint is damaged");
  }
}

void quantize_weight(const Checkpoint& source, const std::string& name,
                     const QuantizeCheckpointOptions& options, Context& ctx,
                     CheckpointWriter& writer) {
  const TensorInfo& info = source.tensors().at(name);
  const int64_t n = info.dims[0], k = info.dims[1], blocks = ceil_div(k, kBand);
  QuantizeOptions rule;
  rule.power_of_two = options.power_of_two_scales;
  std::vector<float> scales;  // [ceil(N/128), ceil(K/128)]
  for (int64_t first = 0; first < n; first += kBand) {
    const int64_t rows = std::min(kBand, n - first);
    const std::vector<float> wide = source.read_rows_f32(name, first, rows);
    check_finite(wide, name, first, k);
    const Tensor codes =
        ctx.arena.tensor(Category::kWorkspace, "quantize codes", DType::kE4M3, {rows, k});
    const Tensor scale = ctx.arena.tensor(Category::kWorkspace, "quantize scales", DType::kF32,
                                          gemm_scale_shape(Grouping::k128x128, rows, k));
    const Fp8View band{codes.view(), scale.view(), Grouping::k128x128};
    quantize(&band, nullptr, ConstView(wide.data(), DType::kF32, {rows, k}, kHost), rule,
             ctx.stream);
    writer.write(name, codes.view().data, codes.view().bytes());
    // One row of blocks: the padding behind it is not stored.
    scales.insert(scales.end(), scale.as<float>(), scale.as<float>() + blocks);
  }
  writer.write(scale_name(name), scales.data(),
               static_cast<int64_t>(scales.size() * sizeof(float)));
}

}  // namespace

CheckpointSummary quantize_checkpoint(const fs::path& source_path, const fs::path& destination,
                                      const QuantizeCheckpointOptions& options) {
  const Checkpoint source = Checkpoint::open(source_path);
  const ModelConfig& config = source.config();
  ROWSHARD_CHECK(!config.fp8.has_value(), ConfigError, source_path.string(),
                 ": block FP8 already; it can be used as it is");
  std::set<std::string> linears;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const LinearModule& linear : config.linears()) {
      linears.insert(layer_prefix(layer) + linear.name + ".weight");
    }
  }

  CheckpointSummary summary;
  std::vector<std::vector<TensorSpec>> groups;
  for (const std::string& name : source.tensors().names()) {
    const TensorInfo& info = source.tensors().at(name);
    summary.bytes_in += info.bytes;
    if (linears.count(name) == 0) {
      groups.push_back({{name, info.tag, info.dims}});
      ++summary.kept;
      continue;
    }
    groups.push_back(
        {{name, safetensors_tag(DType::kE4M3), info.dims},
         {scale_name(name),
          safetensors_tag(DType::kF32),
          {ceil_div(info.dims[0], int64_t{128}), ceil_div(info.dims[1], int64_t{128})}}});
    ++summary.converted;
  }

  CheckpointWriter writer(destination, groups, options.max_shard_bytes);
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  for (const auto& group : groups) {
    const std::string& name = group.front().name;
    if (group.size() == 1) {
      copy_tensor(source.tensors(), name, writer);
    } else {
      quantize_weight(source, name, options, ctx, writer);
    }
  }
  ordered_json json = read_config_for_edit(source_path);
  json["quantization_config"] = {{"quant_method", "fp8"},
                                 {"fmt", "e4m3"},
                                 {"activation_scheme", "dynamic"},
                                 {"weight_block_size", {128, 128}},
                                 {"modules_to_not_convert", {"lm_head"}}};
  writer.finish(source_path, json);
  summary.bytes_out = writer.bytes();
  summary.files = writer.files();
  return summary;
}

}  // namespace rowshard
