// What a job is asked to do, as plain structs: the program fills them from the command line, a
// caller of the library fills them by hand. A default-constructed struct holds the program's
// defaults; only paths are missing. `check` refuses values and combinations that cannot run, before
// any file is opened or any memory taken.
//
// Counts are counts, rates are fractions, lengths are tokens. 0 means "off" or "decide for me", as
// said beside each field.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/world.h"
#include "fp8/gemm.h"
#include "layers/linear.h"

namespace rowshard {

/// How bf16, fp16 or fp32 base weights become what the GEMMs read. A native block-FP8 checkpoint is
/// used as it is.
enum class Recipe {
  kBlock,  // 128x128 blocks, fp32 scales
  kMx,     // 1x32 groups, e8m0 scales
  kBf16,   // no FP8 at all: the reference run
};
const char* to_string(Recipe recipe);  // "block", "mx", "bf16"
Recipe parse_recipe(const std::string& text);

enum class LrSchedule { kCosine, kLinear, kConstant };
const char* to_string(LrSchedule schedule);  // "cosine", "linear", "constant"
LrSchedule parse_lr_schedule(const std::string& text);

enum class Recompute {
  kNone,
  kBlock,  // keep each decoder block's input only, run its forward again in backward
};
const char* to_string(Recompute recompute);  // "none", "block"
Recompute parse_recompute(const std::string& text);

enum class SumDType { kBf16, kFp32 };
const char* to_string(SumDType dtype);  // "bf16", "fp32"
SumDType parse_sum_dtype(const std::string& text);

/// kAuto takes cuda when this process sees a GPU, else the host.
enum class DeviceChoice { kAuto, kCuda, kHost };
const char* to_string(DeviceChoice choice);  // "auto", "cuda", "host"
DeviceChoice parse_device_choice(const std::string& text);

/// What a gathered unit does between its forward and its backward.
struct ReshardAfterForward {
  enum class Mode {
    kTrue,      // shard again; gather once more in backward
    kFalse,     // stay gathered until its backward is done
    kGroup,     // shard again over `group` ranks only (the ranks of a node)
    kResident,  // gathered once for the whole run
  };
  Mode mode = Mode::kTrue;
  int group = 0;  // kGroup: at least 2, divides dp_shard

  bool operator==(const ReshardAfterForward&) const = default;
};
std::string to_string(const ReshardAfterForward& value);  // "true", "false", "8", "resident"
ReshardAfterForward parse_reshard_after_forward(const std::string& text);

ColumnwisePolicy parse_columnwise_policy(const std::string& text);
GemmBackend parse_gemm_backend(const std::string& text);  // "auto", "cublaslt", "own"
CudaTransport parse_transport(const std::string& text);   // "peer", "nccl", "staged"

/// How the model is laid over the ranks and run. ranks = dp_replicate x dp_shard x tp.
struct ExecutionOptions {
  Recipe recipe = Recipe::kBlock;
  int dp_shard = 0;  // 0: the ranks that dp_replicate and tp leave over
  int dp_replicate = 1;
  int tp = 1;
  // No effect with tp = 1:
  bool sequence_parallel = true;  // tokens are split between layers
  bool tp_overlap = true;         // transfers run beside the products; off to compare, same bits
  SumDType tp_sums = SumDType::kBf16;  // what partial products travel in
  ReshardAfterForward reshard_after_forward;
  /// With `false`: units stay gathered from one micro-batch of a step to the next, so that a step
  /// gathers each once.
  bool keep_over_accumulation = false;
  ColumnwisePolicy columnwise = ColumnwisePolicy::kRelease;
  GemmBackend gemm = GemmBackend::kAuto;  // who computes FP8 products on Hopper
  int gemm_multiprocessors = 0;           // bound for FP8 products on Hopper; 0: all
  int prefetch = 2;                       // units gathered ahead, 0 … 8
  DeviceChoice device = DeviceChoice::kAuto;
  CudaTransport transport = CudaTransport::kPeer;  // how cuda buffers travel between ranks
};

struct LoraOptions {
  int64_t r = 16;
  double alpha = 32;   // the branch is scaled by alpha / r
  double dropout = 0;  // [0, 1)
  /// Last parts of module names ("q_proj"); "all-linear" alone means every linear but the head.
  std::vector<std::string> target_modules{"all-linear"};
};

/// `rowshard finetune`
struct FinetuneOptions {
  std::string model;       // Hugging Face directory
  std::string data;        // token file of launch/prepare_data.py
  std::string output_dir;  // made if missing
  LoraOptions lora;
  ExecutionOptions execution;

  Recompute recompute = Recompute::kNone;
  bool cuda_graph = false;  // finetune/step_graphs.h

  // One optimiser step sees micro_batch_size x grad_accum x dp_shard x dp_replicate sequences.
  int64_t micro_batch_size = 1;
  int64_t grad_accum = 1;
  int64_t seq_len = 0;  // tokens a sequence; 0: the model's maximum, at most 1024
  bool packing = true;  // several samples share a sequence and do not see each other
  /// Micro-batches are padded to a multiple of so many tokens, and so are the tokens of each that
  /// go through the head: few shapes, for cuda_graph. 1: as they come.
  int64_t pad_to = 1;

  int64_t max_steps = 0;  // optimiser steps; 0: counted in epochs
  int64_t epochs = 1;     // used only when max_steps is 0
  double lr = 2e-4;
  LrSchedule lr_schedule = LrSchedule::kCosine;
  int64_t warmup_steps = 0;
  double weight_decay = 0;
  double clip_norm = 1;  // global gradient norm; 0: never clipped (still reported)

  std::string eval_data;        // token file; empty: no evaluation
  int64_t eval_every = 0;       // steps; 0: after the last step only
  int64_t save_every = 0;       // steps between resumable checkpoints; 0: after the last step only
  int64_t keep = 2;             // resumable checkpoints kept, the newest
  std::string resume = "none";  // auto (the newest under output_dir, if any) | directory | none

  uint64_t seed = 42;
  std::string trace;     // Chrome trace file, one a rank; empty: none
  bool dry_run = false;  // load and check everything, run no step, write nothing
};

/// `rowshard plan`: what the same options would do; data and output_dir are not needed.
struct PlanOptions {
  FinetuneOptions finetune;
  bool json = false;  // one JSON object instead of tables
};

/// `rowshard evaluate`
struct EvaluateOptions {
  std::string model;
  std::string adapter;  // PEFT directory; empty: the base alone
  std::string data;
  ExecutionOptions execution;
  int64_t micro_batch_size = 1;
  int64_t seq_len = 0;  // as in FinetuneOptions
  bool packing = true;
  bool json = false;  // one JSON object instead of a table
};

/// `rowshard generate`: greedy.
struct GenerateOptions {
  std::string model;
  std::string adapter;              // PEFT directory; empty: the base alone
  std::string prompt;               // text; the caller makes ids of it
  bool chat = false;                // prompt is a user's turn, for the model's chat template
  std::vector<int64_t> prompt_ids;  // used when prompt is empty
  ExecutionOptions execution;
  int64_t max_new_tokens = 64;
  bool json = false;
};

/// Throw ConfigError, naming the program's option and what it takes, for a value out of range or a
/// combination that cannot run. Files are not looked at.
void check(const ExecutionOptions& options);
void check(const LoraOptions& options);
void check(const FinetuneOptions& options);
void check(const PlanOptions& options);
void check(const EvaluateOptions& options);
void check(const GenerateOptions& options);

}  // namespace rowshard
