#include "finetune/step_bench.h"

#include <algorithm>
#include <numeric>

#include "finetune/trace_file.h"

namespace rowshard {

namespace {

constexpr int kWarmUp = 2;  // with graphs: one step queued, one recorded
constexpr int kTurns = 2;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

std::vector<int> all_ranks(const World& world) {
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class StepBench {
 public:
  StepBench(World& world, const StepBenchOptions& options)
      : options_(options),
        run_(world, options),
        control_(world.host_communicator("bench control", all_ranks(world))) {}

  StepBenchResult run() {
    PlanPolicy resident = job().model().options().plan;
    resident.reshard = ReshardMode::kResident;
    std::vector<Mode> modes{
        {to_string(options_.execution.reshard_after_forward), job().model().options().plan}};
    if (options_.baseline && modes[0].plan.reshard != ReshardMode::kResident &&
        (job().mesh().dp_shard > 1 || !job().tensor_parallel()))
      modes.push_back({"resident", resident});
    const bool compared = modes.size() == 2;
    if (options_.baseline && options_.cuda_graph) {
      modes.push_back({"no graph", modes[0].plan});
      modes.back().graph = false;
    }
    if (options_.baseline && job().tensor_parallel()) {
      modes.push_back({"tp waits", modes[0].plan});
      modes.back().overlap = false;
    }
    for (int turn = 0; turn < kTurns; ++turn) {
      for (Mode& mode : modes)
        measure(mode, (options_.steps + kTurns - 1) / kTurns);
    }
    if (!options_.trace.empty()) {
      job().model().set_plan(modes[0].plan);
      step();
      Trace trace(job().context().stream);
      step();
      write_trace(trace, options_.trace, job().world());
    }
    StepBenchResult result;
    for (const Mode& mode : modes)
      result.modes.push_back(summary(mode));
    if (compared) {
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
    bool overlap = true;
    bool graph = true;  // with options.cuda_graph
    std::vector<double> step_ms{}, wait_ms{}, tp_wait_ms{}, reduction_ms{};
    int64_t wire_bytes = 0, peak_bytes = 0;
  };

  Job& job() { return run_.job(); }

  void step() {
    const SyntheticRun::Step step = run_.step(/*lr=*/0, Follows::kStep);
    if (run_.steps() == 1)
      first_ = step;
    ROWSHARD_CHECK(step == first_, Error, "step ", run_.steps(), " gave loss ", step.loss,
                   " and gradient norm ", step.grad_norm, "; the first step gave ", first_.loss,
                   " and ", first_.grad_norm, ": modes and steps must not change a bit");
  }

  double slowest(double value) {
    Stream stream(kHost);
    control_->all_reduce(View(&value, DType::kF64, {1}, kHost), Reduction::kMax, stream);
    return value;
  }

  void measure(Mode& mode, int steps) {
    job().model().set_plan(mode.plan);
    run_.use_graphs(mode.graph);
    TensorParallel* tp = job().tensor_parallel();
    if (tp)
      tp->overlap = mode.overlap && options_.execution.tp_overlap;
    for (int i = 0; i < kWarmUp; ++i) {
      step();
      if (i == 0)
        job().arena().reset_peak();  // a replay asks the arena for nothing; the recording did
    }
    for (int i = 0; i < steps; ++i) {
      const int64_t wire = job().wire_bytes();
      control_->barrier();
      const double begin = now_seconds();
      step();
      const double seconds = now_seconds() - begin;
      mode.wire_bytes = job().wire_bytes() - wire;
      mode.step_ms.push_back(slowest(seconds * 1e3));
      mode.wait_ms.push_back(slowest(job().model().scheduler().exposed_seconds() * 1e3));
      mode.tp_wait_ms.push_back(slowest(tp ? tp->waits.seconds() * 1e3 : 0));
      mode.reduction_ms.push_back(slowest(run_.optimizer().reduction_seconds() * 1e3));
    }
    mode.peak_bytes = job().arena().total().peak;
  }

  StepMeasurement summary(const Mode& mode) {
    StepMeasurement result;
    result.mode = mode.name;
    result.step_ms = median(mode.step_ms);
    result.wait_ms = median(mode.wait_ms);
    result.tp_wait_ms = median(mode.tp_wait_ms);
    result.reduction_ms = median(mode.reduction_ms);
    result.tokens_per_second = static_cast<double>(options_.tokens * options_.grad_accum) *
                               run_.job().mesh().data_parallel() / result.step_ms * 1e3;
    result.wire_bytes = mode.wire_bytes;
    result.peak_bytes = mode.peak_bytes;
    result.loss = first_.loss;
    result.grad_norm = first_.grad_norm;
    return result;
  }

  StepBenchOptions options_;
  SyntheticRun run_;
  std::unique_ptr<Communicator> control_;
  SyntheticRun::Step first_;
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
  ROWSHARD_CHECK(!options.cuda_graph || options.trace.empty(), ConfigError,
                 "--trace FILE shows nothing of a recorded step: use --cuda-graph false");
  ROWSHARD_CHECK(model.head_dim % 2 == 0, ConfigError, "--head-dim ", model.head_dim,
                 ": must be even");
}

StepBenchResult bench_step(World& world, const StepBenchOptions& options) {
  check(options);
  return StepBench(world, options).run();
}

}  // namespace rowshard
