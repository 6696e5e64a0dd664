#include "finetune/step_bench.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "finetune/adapter_optimizer.h"
#include "finetune/job.h"
#include "finetune/options_text.h"
#include "finetune/trace_file.h"

namespace rowshard {

namespace {

constexpr int kWarmUp = 2;
constexpr int kTurns = 2;

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

std::string to_text(const StepBenchOptions& o) {
  const ModelConfig& m = o.model;
  return message("hidden ", m.hidden_size, " ffn ", m.intermediate_size, " layers ", m.layers,
                 " heads ", m.heads, " ", m.kv_heads, " ", m.head_dim, " vocabulary ", m.vocab_size,
                 " ", to_text(o.execution), " r ", o.lora.r, " recompute ", to_string(o.recompute),
                 " tokens ", o.tokens, " accum ", o.grad_accum, " steps ", o.steps, " baseline ",
                 o.baseline);
}

AdapterConfig adapter_of(const StepBenchOptions& options) {
  AdapterConfig config;
  config.r = static_cast<int>(options.lora.r);
  config.alpha = options.lora.alpha;
  config.target_modules = options.lora.target_modules;
  return config;
}

class StepBench {
 public:
  StepBench(World& world, const StepBenchOptions& options)
      : options_(options),
        job_(world, options.model, options.execution, options.recompute, to_text(options)),
        control_(world.host_communicator("bench control", job_.reduce_group().members())),
        adapters_(options.model, adapter_of(options), job_.data_size(),
                  job_.model().options().activations, 1, job_.context()),
        optimizer_(adapters_, job_.reduce_group(), 0, 1, job_.context()) {
    Context& ctx = job_.context();
    RandomSource source;
    job_.load(source);
    // B is not zero: a product with zeros is faster, and A's gradient would be nothing.
    std::vector<float> values(adapters_.count(), 0.0f);
    for (int64_t i = 0; i < adapters_.trainable(); ++i)
      values[i] = static_cast<float>(static_cast<int64_t>(mix(i + 1) >> 40) - (1 << 23)) * 0x1p-30f;
    copy(adapters_.parameters(),
         ConstView(values.data(), DType::kF32, adapters_.parameters().shape, kHost), ctx.stream);
    adapters_.refresh_compute(ctx.stream);
    loss_sum_ = ctx.arena.tensor(Category::kOptimizer, "loss_sum", DType::kF64, {1});
    std::vector<int32_t> ids, labels;
    const auto vocabulary = static_cast<uint64_t>(options.model.vocab_size);
    for (int64_t i = 0; i < options.tokens; ++i) {
      ids.push_back(static_cast<int32_t>(mix(i * 8191 + job_.data_rank()) % vocabulary));
      labels.push_back(static_cast<int32_t>(mix(i * 131071 + job_.data_rank() + 7) % vocabulary));
    }
    batch_ = std::make_unique<DeviceBatch>(
        ids, labels, std::vector<int32_t>{0, static_cast<int32_t>(options.tokens)}, ctx);
  }

  StepBenchResult run() {
    PlanPolicy resident = job_.model().options().plan;
    resident.reshard = ReshardMode::kResident;
    std::vector<Mode> modes{
        {to_string(options_.execution.reshard_after_forward), job_.model().options().plan}};
    if (options_.baseline && modes[0].plan.reshard != ReshardMode::kResident)
      modes.push_back({"resident", resident});
    for (int turn = 0; turn < kTurns; ++turn) {
      for (Mode& mode : modes)
        measure(mode, (options_.steps + kTurns - 1) / kTurns);
    }
    if (!options_.trace.empty()) {
      job_.model().set_plan(modes[0].plan);
      step();
      Trace trace(job_.context().stream);
      step();
      write_trace(trace, options_.trace, job_.world());
    }
    StepBenchResult result;
    for (const Mode& mode : modes)
      result.modes.push_back(summary(mode));
    if (result.modes.size() == 2) {
      const StepMeasurement& asked = result.modes[0];
      result.not_hidden =
          (asked.step_ms - result.modes[1].step_ms + asked.reduction_ms) / asked.step_ms;
    }
    return result;
  }

 private:
  struct Mode {
    std::string name;
    PlanPolicy plan;
    std::vector<double> step_ms{}, wait_ms{}, reduction_ms{};
    int64_t wire_bytes = 0, peak_bytes = 0;
  };

  void step() {
    Context& ctx = job_.context();
    fill_bytes(adapters_.gradients(), 0, ctx.stream);
    fill_bytes(loss_sum_, 0, ctx.stream);
    const double tokens = static_cast<double>(options_.tokens * options_.grad_accum);
    job_.model().scheduler().reset_exposed();
    for (int64_t k = 0; k < options_.grad_accum; ++k) {
      job_.model().train(*batch_, adapters_, 1.0 / (tokens * job_.data_size()), loss_sum_,
                         Dropout{});
    }
    optimizer_.update(/*lr=*/0, ++steps_);
    const double norm = optimizer_.gradient_norm();
    const double loss = job_.reduce_sum(loss_sum_) / (tokens * job_.data_size());
    ROWSHARD_CHECK(std::isfinite(loss) && std::isfinite(norm), Error, "step ", steps_, ": loss ",
                   loss, ", gradient norm ", norm);
    if (steps_ == 1) {
      loss_ = loss;
      norm_ = norm;
    }
    ROWSHARD_CHECK(loss == loss_ && norm == norm_, Error, "step ", steps_, " gave loss ", loss,
                   " and gradient norm ", norm, "; the first step gave ", loss_, " and ", norm_,
                   ": modes and steps must not change a bit");
  }

  double slowest(double value) {
    Stream stream(kHost);
    control_->all_reduce(View(&value, DType::kF64, {1}, kHost), Reduction::kMax, stream);
    return value;
  }

  void measure(Mode& mode, int steps) {
    job_.model().set_plan(mode.plan);
    for (int i = 0; i < kWarmUp; ++i)
      step();
    job_.arena().reset_peak();
    for (int i = 0; i < steps; ++i) {
      const int64_t wire = job_.wire_bytes();
      control_->barrier();
      const double begin = now_seconds();
      step();
      const double seconds = now_seconds() - begin;
      mode.wire_bytes = job_.wire_bytes() - wire;
      mode.step_ms.push_back(slowest(seconds * 1e3));
      mode.wait_ms.push_back(slowest(job_.model().scheduler().exposed_seconds() * 1e3));
      mode.reduction_ms.push_back(slowest(optimizer_.reduction_seconds() * 1e3));
    }
    mode.peak_bytes = job_.arena().total().peak;
  }

  StepMeasurement summary(const Mode& mode) const {
    StepMeasurement result;
    result.mode = mode.name;
    result.step_ms = median(mode.step_ms);
    result.wait_ms = median(mode.wait_ms);
    result.reduction_ms = median(mode.reduction_ms);
    result.tokens_per_second = static_cast<double>(options_.tokens * options_.grad_accum) *
                               job_.mesh().data_parallel() / result.step_ms * 1e3;
    result.wire_bytes = mode.wire_bytes;
    result.peak_bytes = mode.peak_bytes;
    result.loss = loss_;
    result.grad_norm = norm_;
    return result;
  }

  StepBenchOptions options_;
  Job job_;
  std::unique_ptr<Communicator> control_;
  AdapterSet adapters_;
  AdapterOptimizer optimizer_;
  Tensor loss_sum_;
  std::unique_ptr<DeviceBatch> batch_;
  int64_t steps_ = 0;
  double loss_ = 0, norm_ = 0;
};

}  // namespace

StepBenchOptions default_step_bench() {
  StepBenchOptions options;
  ModelConfig& model = options.model;
  model.hidden_size = 4096;
  model.intermediate_size = 14336;
  model.layers = 32;
  model.heads = 32;
  model.kv_heads = 8;
  model.head_dim = 128;
  model.rms_norm_eps = 1e-5;
  model.vocab_size = 128256;
  model.rope.theta = 500000;
  return options;
}

void check(const StepBenchOptions& options) {
  check(options.execution);
  check(options.lora);
  const ModelConfig& model = options.model;
  const std::pair<const char*, int64_t> sizes[] = {
      {"--hidden", model.hidden_size},      {"--intermediate", model.intermediate_size},
      {"--layers", model.layers},           {"--heads", model.heads},
      {"--kv-heads", model.kv_heads},       {"--head-dim", model.head_dim},
      {"--vocabulary", model.vocab_size},   {"--tokens", options.tokens},
      {"--grad-accum", options.grad_accum}, {"--steps", options.steps}};
  for (const auto& [name, value] : sizes)
    ROWSHARD_CHECK(value >= 1, ConfigError, name, " ", value, ": must be at least 1");
  ROWSHARD_CHECK(model.heads % model.kv_heads == 0, ConfigError, "--heads ", model.heads,
                 " is no multiple of --kv-heads ", model.kv_heads);
  ROWSHARD_CHECK(model.head_dim % 2 == 0, ConfigError, "--head-dim ", model.head_dim,
                 ": must be even");
}

StepBenchResult bench_step(World& world, const StepBenchOptions& options) {
  check(options);
  StepBenchOptions sized = options;
  sized.model.max_position_embeddings = options.tokens;
  return StepBench(world, sized).run();
}

void RandomSource::read(const WeightSpec& weight, int64_t begin, int64_t end, std::byte* to) {
  if (weight.shape.rank() == 1) {  // norms: ones
    const float one = 1.0f;
    const bf16 half(one);
    const auto* bytes = weight.dtype == DType::kF32 ? reinterpret_cast<const std::byte*>(&one)
                                                    : reinterpret_cast<const std::byte*>(&half);
    for (int64_t i = begin; i < end; ++i)
      to[i - begin] = bytes[i % size_of(weight.dtype)];
    return;
  }
  // e4m3: below 2, so no NaN. bf16: 2^-8 to 2^-6, of either sign.
  const bool fp8 = weight.dtype == DType::kE4M3;
  const uint64_t keep = fp8 ? 0xBFBFBFBFBFBFBFBFull : 0x80FF80FF80FF80FFull;
  const uint64_t set = fp8 ? 0 : 0x3C003C003C003C00ull;
  const uint64_t seed = std::hash<std::string>{}(weight.name);
  for (int64_t word = begin / 8; word * 8 < end; ++word) {
    const uint64_t bits = (mix(seed + static_cast<uint64_t>(word)) & keep) | set;
    const auto* bytes = reinterpret_cast<const std::byte*>(&bits);
    const int64_t first = std::max(begin, word * 8), last = std::min(end, word * 8 + 8);
    std::memcpy(to + (first - begin), bytes + (first - word * 8), last - first);
  }
}

void RandomSource::scales(const WeightSpec& weight, float* to) {
  const int64_t count = ceil_div(weight.shape[0], 128) * ceil_div(weight.shape[1], 128);
  const float typical = 1.6f / std::sqrt(static_cast<float>(weight.shape[1]));
  for (int64_t i = 0; i < count; ++i)
    to[i] = typical * (0.5f + static_cast<float>(i % 11) / 10.0f);
}

}  // namespace rowshard
