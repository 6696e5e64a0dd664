#include "model/inspect.h"

#include "core/error.h"
#include "file_fixture.h"
#include "model/peft_adapter.h"
#include "model/quantize_checkpoint.h"

namespace rowshard::testing {
namespace {

using nlohmann::json;

TEST(Inspect, Models) {
  TemporaryDirectory directory;
  const json config = tiny_config("llama");
  const auto tensors = tiny_tensors(config);
  write_tiny_model(directory / "bf16", config, tensors);
  int64_t elements = 0;
  for (const NamedTensor& tensor : tensors)
    elements += tensor.bytes.size() / 2;
  const json plain = json::parse(inspect(directory / "bf16").json());
  EXPECT_EQ(plain["kind"], "model");
  EXPECT_EQ(plain["parameters"], elements);
  EXPECT_EQ(plain["facts"]["model_type"], "llama");
  EXPECT_EQ(plain["facts"]["quantization"], "none");
  EXPECT_EQ(plain["facts"]["usable"], "yes");
  ASSERT_EQ(plain["tensors"].size(), 1u);
  EXPECT_EQ(plain["tensors"][0]["dtype"], "BF16");
  EXPECT_EQ(plain["tensors"][0]["bytes"], 2 * elements);

  quantize_checkpoint(directory / "bf16", directory / "fp8");
  const Inspection fp8 = inspect(directory / "fp8");
  EXPECT_EQ(fp8.parameters, elements);  // scales are none
  ASSERT_EQ(fp8.groups.size(), 3u);
  EXPECT_EQ(fp8.groups[0].dtype, "F8_E4M3");
  EXPECT_EQ(fp8.groups[0].tensors, 14);
  EXPECT_MENTIONS(fp8.text(), "block FP8 e4m3, 128x128");
  EXPECT_MENTIONS(fp8.text(), "F8_E4M3");
}

TEST(Inspect, AModelWeCannotUseIsStillDescribed) {
  TemporaryDirectory directory;
  json config = tiny_config("llama");
  const auto tensors = tiny_tensors(config);
  config["model_type"] = "mixtral";
  write_tiny_model(directory.path(), config, tensors);
  const json found = json::parse(inspect(directory.path()).json());
  EXPECT_EQ(found["facts"]["model_type"], "mixtral");
  EXPECT_MENTIONS(found["facts"]["usable"].get<std::string>(), "no: ");
  EXPECT_EQ(found["tensors"][0]["tensors"], tensors.size());
}

TEST(Inspect, Adapters) {
  TemporaryDirectory directory;
  const std::vector<float> a(4 * 6, 1.0f), b(3 * 4, 1.0f);
  AdapterConfig config;
  config.r = 4;
  config.alpha = 6;
  config.target_modules = {"q_proj"};
  std::vector<AdapterTensor> tensors;
  for (const char* module :
       {"model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj"}) {
    tensors.push_back({module, ConstView(a.data(), DType::kF32, {4, 6}, kHost),
                       ConstView(b.data(), DType::kF32, {3, 4}, kHost)});
  }
  write_adapter(directory / "a", config, tensors);
  json found = json::parse(inspect(directory / "a").json());
  EXPECT_EQ(found["kind"], "adapter");
  EXPECT_EQ(found["parameters"], 72);
  EXPECT_EQ(found["facts"]["r"], "4");
  EXPECT_EQ(found["facts"]["scale"], "1.5");
  EXPECT_EQ(found["facts"]["layers"], "2");
  EXPECT_EQ(found["facts"]["target_modules"], "q_proj");
  json dora = read_json_file(directory / "a/adapter_config.json");
  dora["use_dora"] = true;
  write_bytes(directory / "a/adapter_config.json", dora.dump());
  found = json::parse(inspect(directory / "a").json());
  EXPECT_MENTIONS(found["facts"]["usable"].get<std::string>(), "DoRA");
  EXPECT_EQ(found["parameters"], 72);
}

TEST(Inspect, TokenFilesAndDamagedFiles) {
  TemporaryDirectory directory;
  write_tensors(directory / "t.safetensors", {named<int32_t>("input_ids", "I32", {3}, {1, 2, 3})},
                {{"format", "rowshard.tokens"}, {"samples", "1"}});
  const json found = json::parse(inspect(directory / "t.safetensors").json());
  EXPECT_EQ(found["kind"], "tokens");
  EXPECT_EQ(found["facts"]["samples"], "1");
  EXPECT_EQ(found["facts"]["tokens"], "3");
  EXPECT_MENTIONS(config_error([&] { inspect(directory.path()); }), "neither config.json");
  EXPECT_MENTIONS(config_error([&] { inspect(directory / "none"); }), "no such directory");
  const json config = tiny_config("llama");
  write_tiny_model(directory / "m", config, tiny_tensors(config));
  std::filesystem::resize_file(directory / "m/model.safetensors", 100'000);
  EXPECT_MENTIONS(config_error([&] { inspect(directory / "m"); }), "truncated");
}

}  // namespace
}  // namespace rowshard::testing
