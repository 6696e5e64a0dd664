#include "model/checkpoint.h"

#include <cstring>

#include "core/error.h"
#include "core/log.h"
#include "file_fixture.h"
#include "fp8/formats.h"

namespace rowshard::testing {
namespace {

using nlohmann::json;

const std::string kQ = "model.layers.1.self_attn.q_proj.weight";  // [192, 192]
const std::string kDown = "model.layers.0.mlp.down_proj.weight";  // [192, 320]: blocks [2, 3]

NamedTensor scale_of(const std::string& weight, std::vector<int64_t> dims) {
  std::vector<float> scales(dims[0] * dims[1]);
  for (size_t i = 0; i < scales.size(); ++i)
    scales[i] = std::ldexp(1.25f, static_cast<int>(i) - 3);
  return named(scale_name(weight), "F32", dims, scales);
}

std::vector<uint8_t> codes_of(int64_t count) {
  std::vector<uint8_t> codes(count);
  for (int64_t i = 0; i < count; ++i)
    codes[i] = static_cast<uint8_t>(i * 7 % 126 | (i % 2) << 7);
  return codes;
}

/// A tiny llama whose down_proj of layer 0 is block FP8.
struct Fp8Model {
  json config = tiny_config("llama");
  std::vector<NamedTensor> tensors;

  Fp8Model() {
    config["quantization_config"] = block_fp8_json();
    tensors = tiny_tensors(config);
    find(tensors, kDown) = named(kDown, "F8_E4M3", {192, 320}, codes_of(192 * 320));
    tensors.push_back(scale_of(kDown, {2, 3}));
  }
  std::string open_error() const {
    TemporaryDirectory directory;
    write_tiny_model(directory.path(), config, tensors);
    return config_error([&] { Checkpoint::open(directory.path()); });
  }
};

TEST(Checkpoint, EveryFamilyOpens) {
  for (const char* type : {"llama", "qwen2", "qwen3"}) {
    TemporaryDirectory directory;
    const json config = tiny_config(type);
    auto tensors = tiny_tensors(config);
    write_tiny_model(directory.path(), config, tensors);
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    EXPECT_FALSE(checkpoint.has_fp8());
    EXPECT_EQ(checkpoint.tensors().names().size(), tensors.size());
    const auto values = checkpoint.read_f32(kQ);
    const auto expected = tile_values(192, 192, 0);
    ASSERT_EQ(values.size(), expected.size());
    bf16 first;
    std::memcpy(&first, find(tensors, kQ).bytes.data(), 2);
    EXPECT_EQ(values[0], static_cast<float>(first));
  }
}

TEST(Checkpoint, RangedReadsAreTheSameBytes) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  auto tensors = tiny_tensors(config);
  write_tiny_model(directory.path(), config, tensors);
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const std::string& bytes = find(tensors, kDown).bytes;  // [192, 320] bf16
  std::string rows(3 * 640, '?');
  checkpoint.tensors().read_rows(kDown, 129, 3, rows.data());
  EXPECT_EQ(rows, bytes.substr(129 * 640, 3 * 640));
  std::string block;
  for (int row = 100; row < 102; ++row)
    block += bytes.substr(row * 640 + 130 * 2, 7 * 2);
  std::string got(block.size(), '?');
  checkpoint.tensors().read_block(kDown, 100, 2, 130, 7, got.data());
  EXPECT_EQ(got, block);
  const auto all = checkpoint.read_f32(kDown);
  const auto some = checkpoint.read_rows_f32(kDown, 129, 3);
  EXPECT_EQ(some, std::vector<float>(all.begin() + 129 * 320, all.begin() + 132 * 320));
  EXPECT_THROW(checkpoint.tensors().read_rows(kDown, 190, 3, rows.data()), LogicError);
  EXPECT_THROW(checkpoint.tensors().read_block(kDown, 0, 1, 318, 3, got.data()), LogicError);
}

TEST(Checkpoint, PlainDtypesWidenExactly) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  auto tensors = tiny_tensors(config);
  const std::string norm = "model.norm.weight", other = "model.layers.0.input_layernorm.weight";
  std::vector<float> wide(192);
  std::vector<f16> half(192);
  for (int i = 0; i < 192; ++i) {
    wide[i] = 1.0f + std::ldexp(static_cast<float>(i), -23);
    half[i] = f16(std::ldexp(static_cast<float>(i + 1), -20));
  }
  find(tensors, norm) = named(norm, "F32", {192}, wide);
  find(tensors, other) = named(other, "F16", {192}, half);
  write_tiny_model(directory.path(), config, tensors);
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_EQ(checkpoint.read_f32(norm), wide);
  const auto widened = checkpoint.read_f32(other);
  for (int i = 0; i < 192; ++i)
    EXPECT_EQ(widened[i], static_cast<float>(half[i]));
}

TEST(Checkpoint, Fp8WeightIsCodeTimesScaleOfItsBlock) {
  Fp8Model model;
  TemporaryDirectory directory;
  write_tiny_model(directory.path(), model.config, model.tensors);
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_TRUE(checkpoint.has_fp8());
  EXPECT_TRUE(checkpoint.is_fp8(kDown));
  EXPECT_FALSE(checkpoint.is_fp8(kQ));
  const auto scales = checkpoint.read_scales(kDown);
  ASSERT_EQ(scales.size(), 6u);
  const auto codes = codes_of(192 * 320);
  const auto values = checkpoint.read_rows_dequantized(kDown, 100, 60);  // crosses a block border
  for (int64_t row = 100; row < 160; ++row) {
    for (int64_t col = 0; col < 320; ++col) {
      const float expected =
          decode_e4m3(codes[row * 320 + col]) * std::ldexp(1.25f, row / 128 * 3 + col / 128 - 3);
      ASSERT_EQ(values[(row - 100) * 320 + col], expected) << row << ", " << col;
    }
  }
  EXPECT_MENTIONS(config_error([&] { checkpoint.read_f32(kDown); }), "F8_E4M3");
  EXPECT_THROW(checkpoint.read_scales(kQ), LogicError);
}

TEST(Checkpoint, ScalesOfEveryDtypeConvertExactly) {
  for (const char* tag : {"F32", "BF16", "F8_E8M0"}) {
    Fp8Model model;
    NamedTensor& scale = model.tensors.back();
    const std::vector<float> expected{0x1p-127f, 0x1p-20f, 1, 0x1p9f, 0x1p127f, 0x1p-126f};
    if (std::string(tag) == "F32") {
      scale = named(scale_name(kDown), tag, {2, 3}, expected);
    } else if (std::string(tag) == "BF16") {
      std::vector<bf16> values;
      for (float value : expected)
        values.push_back(bf16(value));
      scale = named(scale_name(kDown), tag, {2, 3}, values);
    } else {
      scale = named<uint8_t>(scale_name(kDown), tag, {2, 3}, {0, 107, 127, 136, 254, 1});
    }
    TemporaryDirectory directory;
    write_tiny_model(directory.path(), model.config, model.tensors);
    EXPECT_EQ(Checkpoint::open(directory.path()).read_scales(kDown), expected) << tag;
  }
}

TEST(Checkpoint, NanAndNegativeScalesAreRefused) {
  for (float bad : {std::nanf(""), -1.0f, std::numeric_limits<float>::infinity()}) {
    Fp8Model model;
    model.tensors.back() = named<float>(scale_name(kDown), "F32", {2, 3}, {1, 1, 1, 1, bad, 1});
    TemporaryDirectory directory;
    write_tiny_model(directory.path(), model.config, model.tensors);
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    EXPECT_MENTIONS(config_error([&] { checkpoint.read_scales(kDown); }), "block [1, 1]");
  }
}

TEST(Checkpoint, Fp8WithoutScale) {
  Fp8Model model;
  model.tensors.pop_back();
  EXPECT_MENTIONS(model.open_error(), "FP8 weight " + kDown + " has no scale");
}

TEST(Checkpoint, ScaleWithoutFp8Weight) {
  Fp8Model model;
  model.tensors.push_back(scale_of(kQ, {2, 2}));
  EXPECT_MENTIONS(model.open_error(), kQ + " of BF16 [192, 192], which is not FP8");
  Fp8Model orphan;
  orphan.tensors.push_back(scale_of("model.layers.9.x.weight", {2, 2}));
  EXPECT_MENTIONS(orphan.open_error(), "has no weight model.layers.9.x.weight");
}

TEST(Checkpoint, TransposedScaleIsRefused) {
  Fp8Model model;
  model.tensors.back() = scale_of(kDown, {3, 2});
  const std::string error = model.open_error();
  EXPECT_MENTIONS(error, "F32 [3, 2], and [2, 3] is needed");
  EXPECT_MENTIONS(error, "transposed");
}

TEST(Checkpoint, WrongScaleShapeAndDtype) {
  Fp8Model model;
  model.tensors.back() = scale_of(kDown, {2, 2});
  EXPECT_MENTIONS(model.open_error(), "F32 [2, 2], and [2, 3] is needed");
  Fp8Model half;
  half.tensors.back() = named(scale_name(kDown), "F16", {2, 3}, std::vector<f16>(6, f16(1.0f)));
  EXPECT_MENTIONS(half.open_error(), "F32, BF16 or F8_E8M0 is needed");
}

TEST(Checkpoint, Fp8WithoutQuantizationConfig) {
  Fp8Model model;
  model.config.erase("quantization_config");
  EXPECT_MENTIONS(model.open_error(), "no quantization_config");
}

TEST(Checkpoint, Fp8HeadIsRefused) {
  Fp8Model model;
  find(model.tensors, "lm_head.weight") =
      named("lm_head.weight", "F8_E4M3", {11, 192}, codes_of(11 * 192));
  model.tensors.push_back(scale_of("lm_head.weight", {1, 2}));
  EXPECT_MENTIONS(model.open_error(), "lm_head.weight is F8_E4M3 [11, 192], and BF16");
}

TEST(Checkpoint, ListedAsNotConvertedButFp8IsTakenAndLogged) {
  Fp8Model model;
  // "mlp.down" is no whole component: it lists nothing.
  model.config["quantization_config"]["modules_to_not_convert"] = {"mlp.down", "0.mlp.down_proj"};
  TemporaryDirectory directory;
  write_tiny_model(directory.path(), model.config, model.tensors);
  std::vector<std::string> lines;
  set_log_sink([&](const std::string& line) { lines.push_back(line); });
  EXPECT_TRUE(Checkpoint::open(directory.path()).is_fp8(kDown));
  model.config["quantization_config"]["modules_to_not_convert"] = {"mlp.down"};
  write_tiny_model(directory.path(), model.config, model.tensors);
  Checkpoint::open(directory.path());
  set_log_sink(nullptr);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_MENTIONS(lines[0], "although config.json lists model.layers.0.mlp.down_proj");
}

TEST(Checkpoint, MissingMisshapenAndForeignTensors) {
  const json config = tiny_config("qwen3");
  const auto complete = tiny_tensors(config);
  for (const NamedTensor& tensor : complete) {
    auto tensors = complete;
    std::erase_if(tensors,
                  [&](const NamedTensor& other) { return other.spec.name == tensor.spec.name; });
    TemporaryDirectory directory;
    write_tiny_model(directory.path(), config, tensors);
    EXPECT_MENTIONS(config_error([&] { Checkpoint::open(directory.path()); }),
                    "no tensor " + tensor.spec.name);
  }
  auto tensors = complete;
  find(tensors, kDown) = named(kDown, "BF16", {320, 192}, tile_values(320, 192, 0));
  TemporaryDirectory directory;
  write_tiny_model(directory.path(), config, tensors);
  EXPECT_MENTIONS(config_error([&] { Checkpoint::open(directory.path()); }),
                  "BF16 [320, 192], and config.json asks for [192, 320]");
  find(tensors, kDown) = named(kDown, "F64", {192, 320}, std::vector<double>(192 * 320));
  write_tiny_model(directory.path(), config, tensors);
  EXPECT_MENTIONS(config_error([&] { Checkpoint::open(directory.path()); }), "F64 [192, 320], and");
}

TEST(Checkpoint, ABiasTheConfigDoesNotKnowIsRefused) {
  const json config = tiny_config("llama");
  auto tensors = tiny_tensors(config);
  tensors.push_back(named("model.layers.0.self_attn.q_proj.bias", "BF16", {192},
                          std::vector<bf16>(192, bf16(1.0f))));
  TemporaryDirectory directory;
  write_tiny_model(directory.path(), config, tensors);
  EXPECT_MENTIONS(config_error([&] { Checkpoint::open(directory.path()); }), "has no bias");
}

TEST(Checkpoint, UnknownTensorsAreIgnoredAndCounted) {
  const json config = tiny_config("llama");
  auto tensors = tiny_tensors(config);
  tensors.push_back(named<float>("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {1}, {1}));
  TemporaryDirectory directory;
  write_tiny_model(directory.path(), config, tensors);
  std::vector<std::string> lines;
  set_log_sink([&](const std::string& line) { lines.push_back(line); });
  Checkpoint::open(directory.path());
  set_log_sink(nullptr);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_MENTIONS(lines[0], "1 tensors are not part");
}

TEST(Checkpoint, TiedModelNeedsNoHead) {
  json config = tiny_config("llama");
  config["tie_word_embeddings"] = true;
  TemporaryDirectory directory;
  write_tiny_model(directory.path(), config, tiny_tensors(config));
  EXPECT_FALSE(Checkpoint::open(directory.path()).tensors().contains("lm_head.weight"));
}

/// Two shards; a scale lies in another file than its weight.
struct Sharded {
  TemporaryDirectory directory;
  json index;

  Sharded() {
    Fp8Model model;
    write_bytes(directory / "config.json", model.config.dump());
    std::vector<NamedTensor> parts[2];
    for (size_t i = 0; i < model.tensors.size(); ++i) {
      const std::string& name = model.tensors[i].spec.name;
      const size_t part = name == kDown ? 0 : name == scale_name(kDown) ? 1 : i % 2;
      parts[part].push_back(model.tensors[i]);
      index["weight_map"][name] = part ? "b.safetensors" : "a.safetensors";
    }
    write_tensors(directory / "a.safetensors", parts[0]);
    write_tensors(directory / "b.safetensors", parts[1]);
    write_index();
  }
  void write_index() { write_bytes(directory / "model.safetensors.index.json", index.dump()); }
  std::string open_error() {
    write_index();
    return config_error([&] { Checkpoint::open(directory.path()); });
  }
};

TEST(Checkpoint, ShardsAreOneSet) {
  Sharded sharded;
  const Checkpoint checkpoint = Checkpoint::open(sharded.directory.path());
  EXPECT_EQ(checkpoint.tensors().files().size(), 2u);
  EXPECT_EQ(checkpoint.read_scales(kDown).size(), 6u);
  EXPECT_EQ(checkpoint.tensors().file_of(scale_name(kDown)).filename(), "b.safetensors");
}

TEST(Checkpoint, BrokenIndexes) {
  Sharded sharded;
  const json good = sharded.index;
  sharded.index["weight_map"]["x"] = "z.safetensors";
  sharded.index["weight_map"]["y"] = "c.safetensors";
  EXPECT_MENTIONS(sharded.open_error(), "missing shards: c.safetensors, z.safetensors");
  sharded.index = good;
  sharded.index["weight_map"]["x"] = "a.safetensors";
  EXPECT_MENTIONS(sharded.open_error(), "tensor x is said to be in a.safetensors");
  sharded.index = good;
  sharded.index["weight_map"].erase(kQ);
  EXPECT_MENTIONS(sharded.open_error(), "tensor " + kQ + " is not listed for this file");
  sharded.index = good;
  sharded.index["weight_map"][kQ] = "../a.safetensors";
  EXPECT_MENTIONS(sharded.open_error(), "a file in the same directory");
  sharded.index["weight_map"][kQ] = 3;
  EXPECT_MENTIONS(sharded.open_error(), "no file name");
  sharded.index = {{"weight_map", json::object()}};
  EXPECT_MENTIONS(sharded.open_error(), "no weight_map");
  sharded.index = json::array();
  EXPECT_MENTIONS(sharded.open_error(), "no weight_map");
}

TEST(Checkpoint, DirectoriesWithoutWeights) {
  TemporaryDirectory directory;
  write_bytes(directory / "config.json", tiny_config("llama").dump());
  const auto error = [&] { return config_error([&] { Checkpoint::open(directory.path()); }); };
  EXPECT_MENTIONS(error(), "neither model.safetensors nor model.safetensors.index.json");
  write_bytes(directory / "pytorch_model.bin", "");
  EXPECT_MENTIONS(error(), "safe_serialization");
}

}  // namespace
}  // namespace rowshard::testing
