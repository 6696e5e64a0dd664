#include "finetune/job.h"

#include <algorithm>

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

PlanPolicy plan_policy(const ExecutionOptions& execution) {
  PlanPolicy policy;
  policy.prefetch = execution.prefetch;
  policy.keep = execution.keep_over_accumulation;
  const ReshardAfterForward& reshard = execution.reshard_after_forward;
  switch (reshard.mode) {
    case ReshardAfterForward::Mode::kTrue:
      policy.reshard = ReshardMode::kTrue;
      break;
    case ReshardAfterForward::Mode::kFalse:
      policy.reshard = ReshardMode::kFalse;
      break;
    case ReshardAfterForward::Mode::kResident:
      policy.reshard = ReshardMode::kResident;
      break;
    case ReshardAfterForward::Mode::kGroup:
      policy.reshard = ReshardMode::kGroup;
      policy.group = reshard.group;
      break;
  }
  return policy;
}

std::vector<int> regather_ranks(const ReshardAfterForward& reshard,
                                const std::vector<int>& gather_group, int rank) {
  if (reshard.mode != ReshardAfterForward::Mode::kGroup)
    return {};
  const auto size = static_cast<int>(gather_group.size());
  std::string works;
  for (int k = 2; k <= size; ++k) {
    if (size % k == 0)
      works += message(" ", k);
  }
  ROWSHARD_CHECK(reshard.group >= 2 && size % reshard.group == 0, ConfigError,
                 "--reshard-after-forward ", reshard.group, " does not divide the ", size,
                 " ranks a unit is sharded over; use ",
                 works.empty() ? "true, false or resident" : message("one of", works));
  const auto at = std::ranges::find(gather_group, rank) - gather_group.begin();
  const auto first = gather_group.begin() + at / reshard.group * reshard.group;
  return {first, first + reshard.group};
}

DecoderOptions decoder_options(const ExecutionOptions& execution, Recompute recompute,
                               DeviceKind device) {
  check(execution);
  DecoderOptions options;
  options.linear = execution.recipe == Recipe::kBlock ? Storage::kFp8Block
                   : execution.recipe == Recipe::kMx  ? Storage::kMxRowwise
                                                      : Storage::kPlain;
  // The host is the oracle: f32 activations. cuda computes in bf16, as the GEMMs produce it.
  options.activations = device == DeviceKind::kHost ? DType::kF32 : DType::kBF16;
  options.plan = plan_policy(execution);
  set_gemm_backend(execution.gemm);
  set_gemm_multiprocessors(execution.gemm_multiprocessors);
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
  lay_out(checkpoint_->config(), execution, recompute, all_options);
}

Job::Job(World& world, const ModelConfig& config, const ExecutionOptions& execution,
         Recompute recompute, const std::string& all_options)
    : world_(world),
      mesh_(make_mesh(world.size(), execution.dp_replicate, execution.dp_shard, execution.tp)),
      arena_(world.device()),
      stream_(world.device()),
      ctx_{arena_, stream_} {
  lay_out(config, execution, recompute, all_options);
}

namespace {

// A stale copy of the model on one machine would make gathers of other sizes, which nobody
// survives.
std::string to_text(const ModelConfig& c) {
  std::string linears;
  for (const LinearModule& module : c.linears()) {
    linears += message(" ", module.name, " ", module.n, "x", module.k, module.bias ? " bias" : "");
  }
  return message(to_string(c.family), " layers ", c.layers, " hidden ", c.hidden_size, " heads ",
                 c.heads, " ", c.kv_heads, " ", c.head_dim, " vocabulary ", c.vocab_size, " tied ",
                 c.tie_word_embeddings, " q_norm ", c.qk_norm, linears, " eps ", c.rms_norm_eps,
                 " positions ", c.max_position_embeddings, " rope ", to_string(c.rope.type), " ",
                 c.rope.theta, " ", c.rope.factor, " fp8 ", c.fp8.has_value());
}

}  // namespace

void Job::lay_out(const ModelConfig& config, const ExecutionOptions& execution, Recompute recompute,
                  const std::string& all_options) {
  const DecoderOptions options = decoder_options(execution, recompute, world_.device().kind);
  // Before the first collective: a model that cannot be cut, on every rank alike.
  const DecoderSlice slice =
      DecoderSlice::make(config, options.linear, mesh_.tp, mesh_.coordinates(world_.rank()).tp);
  world_.agree("options", all_options);
  world_.agree("the model", to_text(config));
  const std::vector<int> shard_ranks = mesh_.group(world_.rank(), Axis::kShard);
  gather_ = world_.communicator("gather", shard_ranks);
  const std::vector<int> again =
      regather_ranks(execution.reshard_after_forward, shard_ranks, world_.rank());
  if (!again.empty())
    regather_ = world_.communicator("regather", again);
  reduce_ = world_.communicator("reduce", mesh_.data_group(world_.rank()));
  if (mesh_.tp > 1) {
    const std::vector<int> ranks = mesh_.group(world_.rank(), Axis::kTp);
    tp_ = world_.communicator("tp", ranks);
    tp_host_ = world_.host_communicator("tp host", ranks);
    if (slice.kv_replicas > 1) {
      const auto first = ranks.begin() + slice.rank / slice.kv_replicas * slice.kv_replicas;
      kv_ = world_.communicator("kv", {first, first + slice.kv_replicas});
    }
    tp_stream_ = std::make_unique<Stream>(world_.device(), "tp", -1);
    tensor_parallel_.emplace(TensorParallel{*tp_,
                                            *tp_stream_,
                                            execution.sequence_parallel,
                                            execution.tp_overlap,
                                            execution.tp_sums == SumDType::kFp32,
                                            {}});
  }
  model_ = std::make_unique<DecoderModel>(config, options, *gather_, ctx_, regather_.get(),
                                          tensor_parallel());
}

TensorParallelGroups Job::tensor_parallel_groups() {
  if (!tensor_parallel_)
    return {};
  return {tp_.get(), kv_.get(), tensor_parallel_->sequence};
}

std::vector<float> Job::full_vector(const AdapterSet& adapters, const ConstView& flat) {
  const int64_t count = adapters.count(), ranks = mesh_.tp;
  std::vector<float> flats(ranks * count);
  const int64_t own = mesh_.coordinates(world_.rank()).tp;
  const View part(flats.data() + own * count, DType::kF32, {count}, kHost);
  copy(part, flat, stream_);
  stream_.synchronize();
  if (tp_host_) {
    Stream host(kHost);
    tp_host_->all_gather(View(flats.data(), DType::kF32, {ranks * count}, kHost), part, host);
  }
  return adapters.assemble(flats);
}

int64_t Job::wire_bytes() const {
  int64_t bytes = 0;
  for (const auto* group : {&gather_, &regather_, &reduce_, &tp_, &kv_})
    bytes += *group ? (*group)->wire_bytes() : 0;
  return bytes;
}

double Job::reduce_sum(const View& value) {
  reduce_->all_reduce(value, Reduction::kSum, stream_);
  double result = 0;
  copy(View(&result, DType::kF64, {1}, kHost), value, stream_);
  stream_.synchronize();
  return result;
}

}  // namespace rowshard
