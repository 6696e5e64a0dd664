// LoRA adapters as PEFT directories: adapter_config.json, adapter_model.safetensors, README.md.
//
// What is written loads in stock peft and vLLM: every key of adapter_config.json, sorted; tensors
// "base_model.model.<module>.lora_A.weight" [r, in] and ".lora_B.weight" [out, r], nothing else.
// What peft wrote is read back if it means the same computation here: y += (alpha/r) B A x, one
// rank. DoRA, modules_to_save, biases, rank and alpha patterns and embedding adapters are refused
// by name.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/view.h"

namespace rowshard {

struct AdapterConfig {
  int r = 8;
  double alpha = 8;
  double dropout = 0;
  std::vector<std::string> target_modules;  // "q_proj", …; written sorted, without duplicates
  std::string base_model;                   // base_model_name_or_path
  bool rslora = false;                      // scale alpha/sqrt(r) instead of alpha/r

  double scale() const;
};

/// Borrowed factors of one module, for writing.
struct AdapterTensor {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  ConstView a;         // [r, in] f32, host
  ConstView b;         // [out, r] f32, host
};

/// Owned factors of one module, as read.
struct AdapterModule {
  std::string module;
  int64_t in = 0;
  int64_t out = 0;
  std::vector<float> a;  // [r, in]
  std::vector<float> b;  // [out, r]
};

struct Adapter {
  AdapterConfig config;
  std::vector<AdapterModule> modules;                          // sorted by name
  const AdapterModule* find(const std::string& module) const;  // null when not adapted
};

/// Writes the directory as a whole (hidden sibling, then rename); an existing one is replaced.
/// dtype: f32 or bf16 (rounded to nearest even). ShapeError for factors that do not fit r.
void write_adapter(const std::filesystem::path& directory, const AdapterConfig& config,
                   const std::vector<AdapterTensor>& tensors, DType dtype = DType::kF32);
/// Reads f32, f16 or bf16 factors, exactly; ConfigError names what cannot be honoured.
Adapter read_adapter(const std::filesystem::path& directory);

}  // namespace rowshard
