#include "model/quantize_checkpoint.h"

#include <cstring>

#include "core/error.h"
#include "file_fixture.h"
#include "fp8/formats.h"
#include "model/checkpoint.h"

namespace rowshard::testing {
namespace {

using nlohmann::json;

const std::string kGate = "model.layers.1.mlp.gate_proj.weight";  // [320, 192]: blocks [3, 2]

std::string bytes_of(const TensorFiles& files, const std::string& name) {
  std::string bytes(files.at(name).bytes, '?');
  files.read(name, 0, static_cast<int64_t>(bytes.size()), bytes.data());
  return bytes;
}

/// The code whose value is nearest to x, the even one of two equally near.
uint8_t nearest_code(float x) {
  uint8_t best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (int code = 0; code < 256; ++code) {
    const double value = decode_e4m3(static_cast<uint8_t>(code));
    if (std::isnan(value) || std::signbit(value) != std::signbit(x))
      continue;
    const double d = std::abs(value - static_cast<double>(x));
    if (d < distance || (d == distance && code % 2 == 0)) {
      best = static_cast<uint8_t>(code);
      distance = d;
    }
  }
  return best;
}

/// Checks the codes and scales of one [n, k] weight against the rule, block by block.
void expect_quantized(const Checkpoint& quantized, const std::string& name,
                      const std::string& source_bytes, bool power_of_two) {
  const int64_t n = quantized.tensors().at(name).dims[0], k = quantized.tensors().at(name).dims[1];
  std::vector<float> x(n * k);
  for (int64_t i = 0; i < n * k; ++i) {
    bf16 value;
    std::memcpy(&value, source_bytes.data() + 2 * i, 2);
    x[i] = static_cast<float>(value);
  }
  const std::string codes = bytes_of(quantized.tensors(), name);
  const std::vector<float> scales = quantized.read_scales(name);
  const int64_t blocks = (k + 127) / 128;
  for (int64_t row = 0; row < n; row += 128) {
    for (int64_t col = 0; col < k; col += 128) {
      float amax = 0;
      for (int64_t i = row; i < std::min(n, row + 128); ++i) {
        for (int64_t j = col; j < std::min(k, col + 128); ++j) {
          amax = std::max(amax, std::abs(x[i * k + j]));
        }
      }
      float multiplier = 448.0f / amax;
      if (power_of_two)
        multiplier = std::exp2(std::floor(std::log2(multiplier)));
      ASSERT_EQ(scales[row / 128 * blocks + col / 128], 1.0f / multiplier) << name;
      for (int64_t i = row; i < std::min(n, row + 128); ++i) {
        for (int64_t j = col; j < std::min(k, col + 128); ++j) {
          ASSERT_EQ(static_cast<uint8_t>(codes[i * k + j]), nearest_code(x[i * k + j] * multiplier))
              << name << " [" << i << ", " << j << "]";
        }
      }
    }
  }
}

TEST(QuantizeCheckpoint, LinearsBecomeCodesAndTheRestKeepsItsBytes) {
  for (bool power_of_two : {true, false}) {
    TemporaryDirectory directory;
    const json config = tiny_config(power_of_two ? "llama" : "qwen3");
    auto tensors = tiny_tensors(config);
    write_tiny_model(directory / "in", config, tensors);
    write_bytes(directory / "in/tokenizer.json", "{\"t\": 1}");
    write_bytes(directory / "in/generation_config.json", "{}");
    write_bytes(directory / "in/pytorch_model.bin", "old weights");
    write_bytes(directory / "in/model.safetensors.index.json.bak", "x");
    QuantizeCheckpointOptions options;
    options.power_of_two_scales = power_of_two;
    const CheckpointSummary summary =
        quantize_checkpoint(directory / "in", directory / "out", options);
    EXPECT_EQ(summary.converted, 14);
    EXPECT_EQ(summary.kept, power_of_two ? 7 : 11);
    EXPECT_EQ(summary.files, 1);
    EXPECT_EQ(
        list(directory / "out"),
        (std::vector<std::string>{"config.json", "generation_config.json", "model.safetensors",
                                  "model.safetensors.index.json.bak", "tokenizer.json"}));
    EXPECT_EQ(list(directory.path()), (std::vector<std::string>{"in", "out"}));
    EXPECT_EQ(read_text_file(directory / "out/tokenizer.json"), "{\"t\": 1}");

    const Checkpoint quantized = Checkpoint::open(directory / "out");
    ASSERT_TRUE(quantized.config().fp8.has_value());
    EXPECT_EQ(quantized.tensors().at(scale_name(kGate)).describe(), "F32 [3, 2]");
    int64_t bytes = 0;
    for (const NamedTensor& tensor : tensors) {
      bytes += static_cast<int64_t>(tensor.bytes.size());
      const std::string& name = tensor.spec.name;
      if (name.find("_proj.weight") != std::string::npos) {
        expect_quantized(quantized, name, tensor.bytes, power_of_two);
      } else {
        EXPECT_EQ(bytes_of(quantized.tensors(), name), tensor.bytes) << name;
      }
    }
    EXPECT_EQ(summary.bytes_in, bytes);
    EXPECT_LT(summary.bytes_out, bytes * 6 / 10);
    json expected = config;
    expected["quantization_config"] = block_fp8_json();
    EXPECT_EQ(read_json_file(directory / "out/config.json"), expected);
  }
}

TEST(QuantizeCheckpoint, ShardsHoldTheSameTensors) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  write_tiny_model(directory / "in", config, tiny_tensors(config));
  quantize_checkpoint(directory / "in", directory / "one");
  QuantizeCheckpointOptions options;
  options.max_shard_bytes = 100'000;
  const auto summary = quantize_checkpoint(directory / "in", directory / "many", options);
  EXPECT_GT(summary.files, 4);
  const TensorFiles one = TensorFiles::open(directory / "one");
  const TensorFiles many = TensorFiles::open(directory / "many");
  EXPECT_EQ(static_cast<int>(many.files().size()), summary.files);
  EXPECT_EQ(many.files()[0].path().filename(),
            message("model-00001-of-0000", summary.files, ".safetensors"));
  ASSERT_EQ(one.names(), many.names());
  for (const std::string& name : one.names())
    EXPECT_EQ(bytes_of(one, name), bytes_of(many, name));
  EXPECT_EQ(many.file_of(kGate), many.file_of(scale_name(kGate)));
  for (const SafetensorsFile& file : many.files()) {
    int64_t bytes = 0;
    for (const auto& [name, info] : file.tensors())
      bytes += info.bytes;
    EXPECT_TRUE(bytes <= 100'000 || file.tensors().size() == 1u) << bytes;
  }
  const json index = read_json_file(directory / "many/model.safetensors.index.json");
  EXPECT_EQ(index["metadata"]["total_size"], summary.bytes_out);
  // And a sharded checkpoint is as good an input.
  Checkpoint::open(directory / "many");
}

TEST(QuantizeCheckpoint, RefusesWhatItCannotDo) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  auto tensors = tiny_tensors(config);
  write_tiny_model(directory / "in", config, tensors);
  quantize_checkpoint(directory / "in", directory / "out");
  EXPECT_MENTIONS(config_error([&] { quantize_checkpoint(directory / "out", directory / "x"); }),
                  "block FP8 already");
  EXPECT_MENTIONS(config_error([&] { quantize_checkpoint(directory / "in", directory / "out"); }),
                  "not empty");
  QuantizeCheckpointOptions options;
  options.max_shard_bytes = 0;
  EXPECT_MENTIONS(
      config_error([&] { quantize_checkpoint(directory / "in", directory / "x", options); }),
      "must be positive");
  const uint16_t nan = 0x7fc0;
  std::memcpy(find(tensors, kGate).bytes.data() + 2 * (200 * 192 + 5), &nan, 2);
  write_tiny_model(directory / "in", config, tensors);
  EXPECT_MENTIONS(config_error([&] { quantize_checkpoint(directory / "in", directory / "x"); }),
                  kGate + " has the value nan at [200, 5]");
  EXPECT_EQ(list(directory.path()), (std::vector<std::string>{"in", "out"}));
}

}  // namespace
}  // namespace rowshard::testing
