#include "finetune/options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "core/error.h"

namespace rowshard {

namespace {

template <typename Value, size_t n>
using Names = std::array<std::pair<Value, const char*>, n>;

constexpr Names<Recipe, 3> kRecipes{
    {{Recipe::kBlock, "block"}, {Recipe::kMx, "mx"}, {Recipe::kBf16, "bf16"}}};
constexpr Names<LrSchedule, 3> kSchedules{{{LrSchedule::kCosine, "cosine"},
                                           {LrSchedule::kLinear, "linear"},
                                           {LrSchedule::kConstant, "constant"}}};
constexpr Names<Recompute, 2> kRecomputes{
    {{Recompute::kNone, "none"}, {Recompute::kBlock, "block"}}};
constexpr Names<ColumnwisePolicy, 4> kPolicies{{{ColumnwisePolicy::kRelease, "release"},
                                                {ColumnwisePolicy::kResident, "resident"},
                                                {ColumnwisePolicy::kDirect, "direct"},
                                                {ColumnwisePolicy::kAuto, "auto"}}};
constexpr Names<GemmBackend, 3> kGemmBackends{{{GemmBackend::kAuto, "auto"},
                                               {GemmBackend::kCublasLt, "cublaslt"},
                                               {GemmBackend::kOwn, "own"}}};
constexpr Names<CudaTransport, 4> kTransports{{{CudaTransport::kPeer, "peer"},
                                               {CudaTransport::kNccl, "nccl"},
                                               {CudaTransport::kStaged, "staged"},
                                               {CudaTransport::kPeerStaged, "peer-staged"}}};
constexpr Names<SumDType, 2> kSumDTypes{{{SumDType::kBf16, "bf16"}, {SumDType::kFp32, "fp32"}}};
constexpr Names<DeviceChoice, 3> kDevices{
    {{DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCuda, "cuda"}, {DeviceChoice::kHost, "host"}}};

template <typename Value, size_t n>
const char* name_of(const Names<Value, n>& names, Value value) {
  for (const auto& [known, name] : names) {
    if (known == value)
      return name;
  }
  return "unknown";
}

template <typename Value, size_t n>
Value parse(const Names<Value, n>& names, const char* option, const std::string& text) {
  std::string valid;
  for (const auto& [value, name] : names) {
    if (text == name)
      return value;
    valid += (valid.empty() ? "" : ", ") + std::string(name);
  }
  throw ConfigError(message(option, " ", text, ": use one of ", valid));
}

template <typename Number>
void check_at_least(const char* option, Number value, Number least) {
  ROWSHARD_CHECK(value >= least, ConfigError, option, " ", value, ": must be at least ", least);
}

void check_finite(const char* option, double value) {
  ROWSHARD_CHECK(std::isfinite(value), ConfigError, option, " ", value,
                 ": must be a finite number");
}

void check_given(const char* option, const std::string& value, const char* what) {
  ROWSHARD_CHECK(!value.empty(), ConfigError, option, " is missing: give ", what);
}

constexpr const char* kModelIs = "a Hugging Face model directory";
constexpr const char* kDataIs = "a token file written by launch/prepare_data.py";

}  // namespace

const char* to_string(Recipe recipe) {
  return name_of(kRecipes, recipe);
}
const char* to_string(LrSchedule schedule) {
  return name_of(kSchedules, schedule);
}
const char* to_string(Recompute recompute) {
  return name_of(kRecomputes, recompute);
}
const char* to_string(SumDType dtype) {
  return name_of(kSumDTypes, dtype);
}
const char* to_string(DeviceChoice choice) {
  return name_of(kDevices, choice);
}

Recipe parse_recipe(const std::string& text) {
  return parse(kRecipes, "--recipe", text);
}
LrSchedule parse_lr_schedule(const std::string& text) {
  return parse(kSchedules, "--lr-schedule", text);
}
Recompute parse_recompute(const std::string& text) {
  return parse(kRecomputes, "--recompute", text);
}
ColumnwisePolicy parse_columnwise_policy(const std::string& text) {
  return parse(kPolicies, "--columnwise", text);
}
GemmBackend parse_gemm_backend(const std::string& text) {
  return parse(kGemmBackends, "--gemm", text);
}
CudaTransport parse_transport(const std::string& text) {
  return parse(kTransports, "--transport", text);
}
SumDType parse_sum_dtype(const std::string& text) {
  return parse(kSumDTypes, "--tp-sums", text);
}
DeviceChoice parse_device_choice(const std::string& text) {
  return parse(kDevices, "--device", text);
}

std::string to_string(const ReshardAfterForward& value) {
  switch (value.mode) {
    case ReshardAfterForward::Mode::kTrue:
      return "true";
    case ReshardAfterForward::Mode::kFalse:
      return "false";
    case ReshardAfterForward::Mode::kGroup:
      return std::to_string(value.group);
    case ReshardAfterForward::Mode::kResident:
      return "resident";
  }
  return "unknown";
}

ReshardAfterForward parse_reshard_after_forward(const std::string& text) {
  using Mode = ReshardAfterForward::Mode;
  if (text == "true")
    return {Mode::kTrue};
  if (text == "false")
    return {Mode::kFalse};
  if (text == "resident")
    return {Mode::kResident};
  int group = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), group);
  ROWSHARD_CHECK(error == std::errc{} && end == text.data() + text.size() && group >= 2,
                 ConfigError, "--reshard-after-forward ", text,
                 ": use true, false, resident, or a group size of at least 2 ranks");
  return {Mode::kGroup, group};
}

void check(const ExecutionOptions& options) {
  check_at_least("--dp-shard", options.dp_shard, 0);
  check_at_least("--dp-replicate", options.dp_replicate, 1);
  check_at_least("--tp", options.tp, 1);
  ROWSHARD_CHECK(options.prefetch >= 0 && options.prefetch <= 8, ConfigError, "--prefetch ",
                 options.prefetch, ": must be 0 to 8 units");
  const ReshardAfterForward& reshard = options.reshard_after_forward;
  if (reshard.mode == ReshardAfterForward::Mode::kGroup && options.dp_shard > 0) {
    ROWSHARD_CHECK(reshard.group <= options.dp_shard && options.dp_shard % reshard.group == 0,
                   ConfigError, "--reshard-after-forward ", reshard.group,
                   " does not divide --dp-shard ", options.dp_shard);
  }
  ROWSHARD_CHECK(
      !options.keep_over_accumulation || reshard.mode == ReshardAfterForward::Mode::kFalse,
      ConfigError, "--keep-over-accumulation true keeps what --reshard-after-forward ",
      to_string(reshard), " does not leave gathered: use it with --reshard-after-forward false");
  check_at_least("--gemm-multiprocessors", options.gemm_multiprocessors, 0);
  ROWSHARD_CHECK(options.columnwise != ColumnwisePolicy::kDirect || options.recipe != Recipe::kMx,
                 ConfigError,
                 "--columnwise direct reads 128x128 blocks and does not go with --recipe mx: use "
                 "release or resident");
  ROWSHARD_CHECK(options.tp == 1 || options.recipe != Recipe::kMx, ConfigError, "--tp ", options.tp,
                 " with --recipe mx is not in this version: use --recipe block, or --dp-shard in "
                 "place of --tp");
}

void check(const LoraOptions& options) {
  check_at_least<int64_t>("--lora-r", options.r, 1);
  check_finite("--lora-alpha", options.alpha);
  ROWSHARD_CHECK(options.alpha > 0, ConfigError, "--lora-alpha ", options.alpha,
                 ": must be above 0");
  ROWSHARD_CHECK(options.dropout >= 0 && options.dropout < 1, ConfigError, "--lora-dropout ",
                 options.dropout, ": must be at least 0 and below 1");
  const auto& targets = options.target_modules;
  ROWSHARD_CHECK(!targets.empty() && std::ranges::find(targets, "") == targets.end(), ConfigError,
                 "--target-modules has an empty name: use all-linear, or names like q_proj,v_proj");
  ROWSHARD_CHECK(targets.size() == 1 || std::ranges::find(targets, "all-linear") == targets.end(),
                 ConfigError, "--target-modules: all-linear stands alone");
  ROWSHARD_CHECK(std::set(targets.begin(), targets.end()).size() == targets.size(), ConfigError,
                 "--target-modules names a module twice");
}

namespace {

void check_seq_len(int64_t seq_len, const ExecutionOptions& execution) {
  check_at_least<int64_t>("--seq-len", seq_len, 0);
  ROWSHARD_CHECK(seq_len % execution.tp == 0, ConfigError, "--seq-len ", seq_len,
                 " cannot be split over --tp ", execution.tp, " ranks: use ",
                 seq_len / execution.tp * execution.tp, " or ",
                 (seq_len / execution.tp + 1) * execution.tp);
}

// All but the paths.
void check_numbers(const FinetuneOptions& options) {
  check(options.lora);
  check(options.execution);
  check_at_least<int64_t>("--micro-batch-size", options.micro_batch_size, 1);
  check_at_least<int64_t>("--grad-accum", options.grad_accum, 1);
  check_seq_len(options.seq_len, options.execution);
  check_at_least<int64_t>("--pad-to", options.pad_to, 1);
  ROWSHARD_CHECK(options.pad_to == 1 || options.execution.tp == 1, ConfigError, "--pad-to ",
                 options.pad_to, " with --tp ", options.execution.tp,
                 " is not in this version; leave it 1");
  check_at_least<int64_t>("--max-steps", options.max_steps, 0);
  ROWSHARD_CHECK(options.max_steps > 0 || options.epochs > 0, ConfigError, "--epochs ",
                 options.epochs, ": must be at least 1 (or give --max-steps)");
  check_finite("--lr", options.lr);
  ROWSHARD_CHECK(options.lr > 0, ConfigError, "--lr ", options.lr, ": must be above 0");
  check_at_least<int64_t>("--warmup-steps", options.warmup_steps, 0);
  ROWSHARD_CHECK(options.max_steps == 0 || options.warmup_steps <= options.max_steps, ConfigError,
                 "--warmup-steps ", options.warmup_steps, " is more than --max-steps ",
                 options.max_steps);
  check_finite("--weight-decay", options.weight_decay);
  check_at_least("--weight-decay", options.weight_decay, 0.0);
  check_finite("--clip-norm", options.clip_norm);
  check_at_least("--clip-norm", options.clip_norm, 0.0);
  check_at_least<int64_t>("--eval-every", options.eval_every, 0);
  ROWSHARD_CHECK(options.eval_every == 0 || !options.eval_data.empty(), ConfigError,
                 "--eval-every ", options.eval_every, " needs --eval-data FILE");
  check_at_least<int64_t>("--save-every", options.save_every, 0);
  check_at_least<int64_t>("--keep", options.keep, 1);
  ROWSHARD_CHECK(!options.cuda_graph || options.trace.empty(), ConfigError,
                 "--trace FILE shows nothing of a recorded step: use --cuda-graph false");
  check_given("--resume", options.resume, "auto, none, or a checkpoint directory");
}

}  // namespace

void check(const FinetuneOptions& options) {
  check_given("--model", options.model, kModelIs);
  check_given("--data", options.data, kDataIs);
  check_given("--output-dir", options.output_dir, "the directory the run writes to");
  check_numbers(options);
}

void check(const PlanOptions& options) {
  check_given("--model", options.finetune.model, kModelIs);
  check_numbers(options.finetune);
}

void check(const EvaluateOptions& options) {
  check_given("--model", options.model, kModelIs);
  check_given("--data", options.data, kDataIs);
  check(options.execution);
  check_at_least<int64_t>("--micro-batch-size", options.micro_batch_size, 1);
  check_seq_len(options.seq_len, options.execution);
}

void check(const GenerateOptions& options) {
  check_given("--model", options.model, kModelIs);
  check(options.execution);
  ROWSHARD_CHECK(options.prompt.empty() != options.prompt_ids.empty(), ConfigError,
                 "give exactly one of --prompt TEXT and --prompt-ids 1,2,3");
  ROWSHARD_CHECK(!options.chat || !options.prompt.empty(), ConfigError,
                 "--chat needs --prompt TEXT");
  for (int64_t id : options.prompt_ids) {
    ROWSHARD_CHECK(id >= 0 && id <= std::numeric_limits<int32_t>::max(), ConfigError,
                   "--prompt-ids: ", id, " is no token");
  }
  check_at_least<int64_t>("--max-new-tokens", options.max_new_tokens, 1);
}

}  // namespace rowshard
