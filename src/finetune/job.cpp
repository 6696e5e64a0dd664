#include "finetune/job.h"

#include <algorithm>

#include "core/environment.h"
#include "core/log.h"

namespace rowshard {

namespace {
constexpr int64_t kDefaultSeqLen = 1024;
}

DeviceKind resolve_device(DeviceChoice choice) {
  switch (choice) {
    case DeviceChoice::kHost:
      return DeviceKind::kHost;
    case DeviceChoice::kAuto:
      return cuda_device_count() > 0 ? DeviceKind::kCuda : DeviceKind::kHost;
    case DeviceChoice::kCuda:
      break;
  }
  ROWSHARD_CHECK(cuda_device_count() > 0, ConfigError,
                 "--device cuda: ", cuda_unavailable_reason());
  return DeviceKind::kCuda;
}

int64_t resolve_seq_len(int64_t seq_len, const ModelConfig& config) {
  if (seq_len == 0)
    return std::min(config.max_position_embeddings, kDefaultSeqLen);
  ROWSHARD_CHECK(seq_len <= config.max_position_embeddings, ConfigError, "--seq-len ", seq_len,
                 " is longer than the model's max_position_embeddings ",
                 config.max_position_embeddings);
  return seq_len;
}

ColumnwisePolicy columnwise_policy(ColumnwisePolicy asked) {
  // Read at every start, so that job scripts written for TransformerEngine keep their meaning.
  for (const char* name :
       {"ROWSHARD_RELEASE_FROZEN_WEIGHT_COLUMNWISE", "NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE"}) {
    const std::optional<bool> release = environment_switch(name);
    if (!release)
      continue;
    const ColumnwisePolicy policy =
        *release ? ColumnwisePolicy::kRelease : ColumnwisePolicy::kResident;
    if (policy != asked) {
      log_once(name,
               message(name, "=", *release ? 1 : 0, " overrides --columnwise ", to_string(asked)));
    }
    return policy;
  }
  return asked;
}

DecoderOptions decoder_options(const ExecutionOptions& execution, Recompute recompute,
                               DeviceKind device) {
  ROWSHARD_CHECK(execution.recipe != Recipe::kMx, ConfigError,
                 "--recipe mx: frozen MX units are not in this version; use block or bf16");
  ROWSHARD_CHECK(execution.tp == 1, ConfigError, "--tp ", execution.tp,
                 ": tensor parallelism is not in this version; use --tp 1");
  DecoderOptions options;
  options.fp8 = execution.recipe == Recipe::kBlock;
  // The host is the oracle: f32 activations. cuda computes in bf16, as the GEMMs produce it.
  options.activations = device == DeviceKind::kHost ? DType::kF32 : DType::kBF16;
  options.plan.prefetch = execution.prefetch;
  switch (execution.reshard_after_forward.mode) {
    case ReshardAfterForward::Mode::kTrue:
      options.plan.reshard = ReshardMode::kTrue;
      break;
    case ReshardAfterForward::Mode::kFalse:
      options.plan.reshard = ReshardMode::kFalse;
      break;
    case ReshardAfterForward::Mode::kResident:
      options.plan.reshard = ReshardMode::kResident;
      break;
    case ReshardAfterForward::Mode::kGroup:
      throw ConfigError(
          "--reshard-after-forward with a group size is not in this version; use true, false or "
          "resident");
  }
  ROWSHARD_CHECK(execution.columnwise != ColumnwisePolicy::kDirect, ConfigError,
                 "--columnwise direct is not in this version; use release or resident");
  options.columnwise = columnwise_policy(execution.columnwise);
  options.recompute = recompute == Recompute::kBlock;
  return options;
}

Job::Job(World& world, const std::string& model_directory, const ExecutionOptions& execution,
         Recompute recompute, const std::string& all_options)
    : world_(world),
      checkpoint_(Checkpoint::open(model_directory)),
      mesh_(make_mesh(world.size(), execution.dp_replicate, execution.dp_shard, execution.tp)),
      arena_(world.device()),
      stream_(world.device()),
      ctx_{arena_, stream_} {
  world.agree("options", all_options);
  gather_ = world.communicator("gather", mesh_.group(world.rank(), Axis::kShard));
  reduce_ = world.communicator("reduce", mesh_.data_group(world.rank()));
  model_ = std::make_unique<DecoderModel>(
      config(), decoder_options(execution, recompute, world.device().kind), *gather_, ctx_);
}

double Job::reduce_sum(const View& value) {
  reduce_->all_reduce(value, Reduction::kSum, stream_);
  double result = 0;
  copy(View(&result, DType::kF64, {1}, kHost), value, stream_);
  stream_.synchronize();
  return result;
}

}  // namespace rowshard
