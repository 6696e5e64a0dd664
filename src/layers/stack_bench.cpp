#include "layers/stack_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/graph.h"
#include "core/rng.h"
#include "layers/linear.h"

namespace rowshard {

namespace {

/// Normal values in bf16: one random block laid down again and again at an odd length, so that no
/// two 128-tiles are alike. Zeros, or a buffer nobody filled, would run faster than data.
Tensor random_matrix(int64_t rows, int64_t cols, float scale, uint64_t seed, Context& ctx) {
  constexpr int64_t kBlock = (1 << 18) + 37;
  const Philox rng{seed, 23};
  std::vector<bf16> values(std::min(kBlock, rows * cols));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = bf16(rng.normal(i) * scale);
  Tensor matrix = ctx.arena.tensor(Category::kActivations, "bench.x", DType::kBF16, {rows, cols});
  const View flat = matrix.view().reshape({rows * cols});
  const auto block = static_cast<int64_t>(values.size());
  for (int64_t at = 0; at < rows * cols; at += block) {
    const int64_t count = std::min(block, rows * cols - at);
    copy(flat.slice_rows(at, count), ConstView(values.data(), DType::kBF16, {count}, kHost),
         ctx.stream);
  }
  ctx.stream.synchronize();
  return matrix;
}

class Stack {
 public:
  Stack(const StackBenchOptions& options, ColumnwisePolicy policy, bool both_at_start,
        Stream& stream)
      : arena_(stream.device()), ctx_{arena_, stream} {
    const int64_t features = options.features;
    const float scale = 1 / std::sqrt(static_cast<float>(features));
    for (int i = 0; i < options.layers; ++i) {
      matrices_.push_back(std::make_unique<Fp8Matrix>("stack", features, features,
                                                      Grouping::k128x128, stream.device()));
      const Tensor values = random_matrix(features, features, scale, 100 + i, ctx_);
      matrices_.back()->quantize_from(values, {true, both_at_start}, {}, ctx_);
      stream.synchronize();
    }
    arena_.trim();
    for (const auto& matrix : matrices_) {
      LinearWeight weight;
      weight.name = matrix->name();
      weight.n = weight.k = features;
      weight.fp8 = matrix.get();
      weights_.push_back(weight);
    }
    for (const LinearWeight& weight : weights_)
      linears_.push_back({.weight = &weight, .columnwise = policy});
    x_ = random_matrix(options.tokens, features, 1, 7, ctx_);
    dy_ = random_matrix(options.tokens, features, 1, 8, ctx_);
    result.policy = policy;
    result.both_at_start = both_at_start;
  }

  void step() {
    const auto activation = [&] {
      return arena_.tensor(Category::kActivations, "stack.x", DType::kBF16, x_.shape());
    };
    Tensor x;
    for (const Linear& linear : linears_) {
      Tensor y = activation();
      LinearSaved saved;
      linear_forward(y, x ? ConstView(x) : ConstView(x_), linear, &saved, ctx_);
      x = std::move(y);
    }
    x.reset();  // a loss would have read it; the gradient takes its memory
    Tensor dx = activation();
    for (size_t i = linears_.size(); i-- > 0;) {
      LinearSaved saved;
      const ConstView dy = i + 1 == linears_.size() ? ConstView(dy_) : ConstView(dx);
      linear_backward(dx, dy, saved, linears_[i], false, ctx_);
    }
    dx_view_ = dx.view();
  }
  void measure_bytes() {
    step();
    ctx_.stream.synchronize();
    arena_.mark_steady();
    arena_.reset_peak();
    step();
    ctx_.stream.synchronize();
    result.total = arena_.total();
    result.columnwise = arena_.bytes(Category::kColumnwise);
    result.scales = arena_.bytes(Category::kScales);
  }
  void record() {
    graph_.capture(ctx_.stream, [&] { step(); });
  }
  void run() { graph_.recorded() ? graph_.replay(ctx_.stream) : step(); }

  /// dx of the last step: its block went back to the arena, which nobody has asked since.
  std::vector<uint16_t> gradient() {
    std::vector<uint16_t> bits(dx_view_.elements());
    copy(View(bits.data(), DType::kBF16, dx_view_.shape, kHost), dx_view_, ctx_.stream);
    ctx_.stream.synchronize();
    return bits;
  }

  StackMeasurement result;

 private:
  Arena arena_;
  Context ctx_;
  std::vector<std::unique_ptr<Fp8Matrix>> matrices_;
  std::vector<LinearWeight> weights_;
  std::vector<Linear> linears_;
  Tensor x_, dy_;
  View dx_view_;
  Graph graph_;
};

}  // namespace

void check(const StackBenchOptions& options) {
  const auto at_least_one = [](const char* name, int64_t value) {
    ROWSHARD_CHECK(value >= 1, ConfigError, "--", name, " ", value, ": must be at least 1");
  };
  at_least_one("layers", options.layers);
  at_least_one("tokens", options.tokens);
  at_least_one("repeats", options.repeats);
  at_least_one("steps", options.steps);
  ROWSHARD_CHECK(options.features >= 16 && options.features % 16 == 0, ConfigError, "--features ",
                 options.features, ": must be a multiple of 16");
}

StackBenchResult bench_stack(const StackBenchOptions& options, Device device) {
  check(options);
  ROWSHARD_CHECK(!options.graph || device.is_cuda(), ConfigError,
                 "--graph true: the host has no graphs; use --device cuda");
  Stream stream(device);
  std::vector<std::unique_ptr<Stack>> stacks;
  for (const bool both_at_start : {false, true}) {
    for (const auto policy : {ColumnwisePolicy::kResident, ColumnwisePolicy::kRelease})
      stacks.push_back(std::make_unique<Stack>(options, policy, both_at_start, stream));
  }
  for (auto& stack : stacks) {
    stack->measure_bytes();
    if (options.graph)
      stack->record();
  }
  std::vector<std::vector<double>> times(stacks.size());
  Event begin(device, true), end(device, true);
  for (int repeat = -2; repeat < options.repeats; ++repeat) {  // two to warm up
    for (size_t s = 0; s < stacks.size(); ++s) {
      begin.record(stream);
      for (int i = 0; i < options.steps; ++i)
        stacks[s]->run();
      end.record(stream);
      const double ms = elapsed_ms(begin, end) / options.steps;
      if (repeat >= 0)
        times[s].push_back(ms);
    }
  }
  StackBenchResult result;
  const std::vector<uint16_t> bits = stacks.front()->gradient();
  for (size_t s = 0; s < stacks.size(); ++s) {
    ROWSHARD_CHECK(stacks[s]->gradient() == bits, LogicError,
                   "bench stack: ", to_string(stacks[s]->result.policy), " gives other bits than ",
                   to_string(stacks.front()->result.policy));
    std::sort(times[s].begin(), times[s].end());
    StackMeasurement& measured = stacks[s]->result;
    measured.step_ms = times[s][times[s].size() / 2];
    measured.fastest_ms = times[s].front();
    result.stacks.push_back(measured);
  }
  for (size_t s = 0; s < stacks.size(); s += 2) {
    const StackMeasurement &resident = result.stacks[s], &release = result.stacks[s + 1];
    result.differences.push_back({.both_at_start = resident.both_at_start,
                                  .time = release.step_ms / resident.step_ms - 1,
                                  .steady = resident.total.steady - release.total.steady,
                                  .peak = resident.total.peak - release.total.peak,
                                  .codes = resident.columnwise.steady - release.columnwise.steady});
  }
  return result;
}

}  // namespace rowshard
