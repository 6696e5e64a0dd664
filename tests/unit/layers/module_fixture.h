// The four modules with random weights, in any combination of frozen, trainable, biased, adapted
// and recomputed, and one step of them as a list of named bytes, so that two ways to run can be
// compared to the last bit.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <map>

#include "fp8/quantize.h"
#include "layer_test.h"
#include "layers/grouped_linear.h"
#include "layers/layer_norm_mlp.h"
#include "test_device.h"

namespace rowshard::testing {

enum class ModuleKind { kLinear, kLayerNormLinear, kLayerNormMlp, kGroupedLinear };
inline const char* to_string(ModuleKind kind) {
  constexpr const char* kNames[] = {"Linear", "LayerNormLinear", "LayerNormMlp", "GroupedLinear"};
  return kNames[static_cast<int>(kind)];
}
inline constexpr ModuleKind kModules[] = {ModuleKind::kLinear, ModuleKind::kLayerNormLinear,
                                          ModuleKind::kLayerNormMlp, ModuleKind::kGroupedLinear};

struct ModuleOptions {
  int64_t tokens = 64, hidden = 256, ffn = 512;
  std::vector<int64_t> expert_rows = {24, 0, 40};
  bool bias = false, lora = false, trainable = false, delay = false;
  bool workspace = false;            // bf16 weights with FP8 workspaces, in place of FP8 weights
  bool fp8 = true;                   // false: plain bf16 weights
  bool columnwise_at_start = false;  // both copies from the start, as if made to be trained
  Grouping grouping = Grouping::k128x128;
  NormKind norm = NormKind::kRms;
  Activation activation = Activation::kSwiGlu;
  ColumnwisePolicy policy = ColumnwisePolicy::kRelease;
  BackwardOverride backward_override = BackwardOverride::kNone;
};

using NamedBytes = std::map<std::string, std::vector<uint8_t>>;

/// "" when all is equal, else the first tensor that differs and where.
inline std::string difference(const NamedBytes& a, const NamedBytes& b) {
  for (const auto& [name, bytes] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second.size() != bytes.size())
      return name + " is missing or of another size";
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != other->second[i])
        return message(name, " differs at byte ", i, " of ", bytes.size());
    }
  }
  return a.size() == b.size() ? "" : "more tensors on one side";
}

/// 128-tiles of their own magnitude, so that a scale of another tile shows.
inline std::vector<bf16> tiled_values(int64_t rows, int64_t cols, uint32_t seed, double scale) {
  Doubles v = random_values(rows * cols, seed, scale);
  for (int64_t i = 0; i < rows * cols; ++i)
    v[i] *= std::exp2((i / cols / 128 * 3 + i % cols / 128) % 4);
  return narrowed<bf16>(v);
}

/// One weight with everything that can hang on it.
struct TestWeight {
  static constexpr int64_t kRank = 8;
  LinearWeight weight;
  LoraFactors lora;
  std::unique_ptr<Fp8Matrix> matrix;
  std::unique_ptr<Fp8Workspace> workspace;
  bool adapted = false;  // in the next call
  Tensor master, bias, bias_gradient, gradient, a, b, grad_a, grad_b;

  TestWeight(Bench& bench, const std::string& name, int64_t n, int64_t k, uint32_t seed,
             const ModuleOptions& options) {
    master = bench.upload(tiled_values(n, k, seed, 0.05), {n, k});
    weight.name = name;
    weight.n = n;
    weight.k = k;
    if (!options.fp8) {
      weight.plain = master;
    } else if (options.workspace) {
      workspace.reset(
          new Fp8Workspace{Fp8Matrix(name, n, k, options.grouping, bench.ctx.device())});
      weight.workspace = workspace.get();
      weight.plain = master;
      weight.version = 1;
    } else {
      matrix = std::make_unique<Fp8Matrix>(name, n, k, options.grouping, bench.ctx.device());
      matrix->quantize_from(master, {true, options.columnwise_at_start}, {}, bench.ctx);
      weight.fp8 = matrix.get();
    }
    const auto zeros = [&](Shape shape) {
      return bench.upload(std::vector<float>(shape.elements(), 0), shape);
    };
    if (options.bias) {
      bias = bench.upload(narrowed<bf16>(random_values(n, seed + 1)), {n});
      bias_gradient = zeros({n});
      weight.bias = bias;
      weight.bias_gradient = bias_gradient;
    }
    gradient = zeros({n, k});
    if (options.lora) {
      a = bench.upload(narrowed<bf16>(random_values(kRank * k, seed + 2, 0.1)), {kRank, k});
      b = bench.upload(narrowed<bf16>(random_values(n * kRank, seed + 3, 0.1)), {n, kRank});
      grad_a = zeros({kRank, k});
      grad_b = zeros({n, kRank});
      lora = {a, b, grad_a, grad_b, 2.0f};
      adapted = true;
    }
    set_trainable(options.trainable);
  }
  void set_trainable(bool trainable) { weight.gradient = trainable ? gradient.view() : View(); }
  Usage usage() const { return weight.quantized()->usage(); }
};

class Module {
 public:
  Bench& bench;
  ModuleKind kind;
  ModuleOptions options;
  std::deque<TestWeight> weights;  // addresses stay
  Tensor x, dy, y, dx, norm_weight, norm_gradient;

  Module(Bench& bench_, ModuleKind kind_, const ModuleOptions& options_)
      : bench(bench_), kind(kind_), options(options_) {
    const int64_t t = options.tokens, h = options.hidden, f = options.ffn;
    const auto weight = [&](const char* name, int64_t n, int64_t k) {
      weights.emplace_back(bench, name, n, k, 10 + 7 * static_cast<uint32_t>(weights.size()),
                           options);
    };
    int64_t out = f;
    switch (kind) {
      case ModuleKind::kLinear:
        weight("linear", f, h);
        break;
      case ModuleKind::kLayerNormLinear:
        weight("q", f, h);
        weight("k", f, h);
        break;
      case ModuleKind::kLayerNormMlp:
        weight("gate", f, h);
        if (is_gated(options.activation))
          weight("up", f, h);
        weight("down", h, f);
        out = h;
        break;
      case ModuleKind::kGroupedLinear:
        for (size_t e = 0; e < options.expert_rows.size(); ++e)
          weight("expert", f, h);
    }
    const int64_t results = kind == ModuleKind::kLayerNormLinear ? 2 : 1;
    x = bench.upload(tiled_values(t, h, 1, 1), {t, h});
    dy = bench.upload(tiled_values(results * t, out, 2, 0.1), {results * t, out});
    y = bench.arena.tensor(Category::kActivations, "test.y", DType::kBF16, dy.shape());
    dx = bench.arena.tensor(Category::kActivations, "test.dx", DType::kBF16, x.shape());
    norm_weight = bench.upload(narrowed<bf16>(random_values(h, 3)), {h});
    norm_gradient = bench.upload(std::vector<float>(h, 0), {h});
  }

  std::vector<Linear> linears() const {
    std::vector<Linear> result;
    for (const TestWeight& w : weights) {
      Linear linear;
      linear.weight = &w.weight;
      linear.lora = w.adapted ? &w.lora : nullptr;
      linear.columnwise = options.policy;
      linear.backward_override = options.backward_override;
      linear.delay_weight_gradient = options.delay;
      result.push_back(linear);
    }
    return result;
  }
  Norm norm() const { return {.kind = options.norm, .weight = norm_weight}; }
  NormGradients norm_gradients() const {
    return {.weight = options.trainable ? norm_gradient.view() : View()};
  }

  struct Saved {
    LinearSaved linear;
    LayerNormLinearSaved norm_linear;
    LayerNormMlpSaved mlp;
    GroupedLinearSaved grouped;
  };

  void forward(Saved* saved, Context& ctx) {
    const std::vector<Linear> layers = linears();
    switch (kind) {
      case ModuleKind::kLinear:
        return linear_forward(y, x, layers[0], saved ? &saved->linear : nullptr, ctx);
      case ModuleKind::kLayerNormLinear:
        return layer_norm_linear_forward(
            std::array<View, 2>{y.view().slice_rows(0, options.tokens),
                                y.view().slice_rows(options.tokens, options.tokens)},
            x, norm_linear(layers), saved ? &saved->norm_linear : nullptr, ctx);
      case ModuleKind::kLayerNormMlp:
        return layer_norm_mlp_forward(y, x, mlp(layers), saved ? &saved->mlp : nullptr, ctx);
      case ModuleKind::kGroupedLinear:
        return grouped_linear_forward(y, x, options.expert_rows, layers,
                                      saved ? &saved->grouped : nullptr, ctx);
    }
  }
  /// Before delayed gradients: whatever backward has freed is somebody else's.
  void reuse_memory(Context& ctx) {
    if (!options.delay)
      return;
    std::vector<Tensor> others;
    for (const int64_t width : {options.ffn, options.hidden}) {
      for (int i = 0; i < 8; ++i) {
        others.push_back(ctx.arena.tensor(Category::kWorkspace, "test.other", DType::kBF16,
                                          {options.tokens, width}));
        fill_bytes(others.back(), 0xff, ctx.stream);
      }
    }
  }
  void backward(Saved& saved, Context& ctx, bool want_dx = true) {
    const std::vector<Linear> layers = linears();
    const View to = want_dx ? dx.view() : View();
    switch (kind) {
      case ModuleKind::kLinear:
        linear_backward(to, dy, saved.linear, layers[0], false, ctx);
        reuse_memory(ctx);
        if (options.delay && options.trainable)
          linear_weight_gradient(saved.linear, layers[0], ctx);
        return;
      case ModuleKind::kLayerNormLinear:
        layer_norm_linear_backward(
            to,
            std::array<ConstView, 2>{dy.view().slice_rows(0, options.tokens),
                                     dy.view().slice_rows(options.tokens, options.tokens)},
            saved.norm_linear, norm_linear(layers), false, ctx);
        reuse_memory(ctx);
        return layer_norm_linear_weight_gradient(saved.norm_linear, norm_linear(layers), ctx);
      case ModuleKind::kLayerNormMlp:
        layer_norm_mlp_backward(to, dy, saved.mlp, mlp(layers), false, ctx);
        reuse_memory(ctx);
        return layer_norm_mlp_weight_gradient(saved.mlp, mlp(layers), ctx);
      case ModuleKind::kGroupedLinear:
        grouped_linear_backward(to, dy, saved.grouped, layers, false, ctx);
        reuse_memory(ctx);
        return grouped_linear_weight_gradient(saved.grouped, layers, ctx);
    }
  }
  /// Forward and backward. `recompute`: a first forward without gradients, and again before
  /// backward.
  void run(bool recompute, Context& ctx) {
    Saved saved;
    if (recompute)
      forward(nullptr, ctx);
    forward(&saved, ctx);
    backward(saved, ctx);
  }
  /// Gradients to zero, results to a pattern: nothing of an earlier step can pass for this one's.
  void clear() {
    for (TestWeight& w : weights) {
      for (const Tensor* t : {&w.bias_gradient, &w.gradient, &w.grad_a, &w.grad_b}) {
        if (*t)
          fill_bytes(*t, 0, bench.stream);
      }
    }
    fill_bytes(norm_gradient, 0, bench.stream);
    fill_bytes(y, 0x55, bench.stream);
    fill_bytes(dx, 0x55, bench.stream);
  }
  NamedBytes results() {
    NamedBytes all;
    all["y"] = bench.download<uint8_t>(y);
    all["dx"] = bench.download<uint8_t>(dx);
    all["norm"] = bench.download<uint8_t>(norm_gradient);
    for (size_t i = 0; i < weights.size(); ++i) {
      const TestWeight& w = weights[i];
      const auto add = [&](const char* what, const Tensor& tensor) {
        if (tensor)
          all[message(w.weight.name, i, " ", what)] = bench.download<uint8_t>(tensor);
      };
      add("bias_gradient", w.bias_gradient);
      add("gradient", w.gradient);
      add("grad_a", w.grad_a);
      add("grad_b", w.grad_b);
    }
    return all;
  }
  /// One step from clean buffers.
  NamedBytes step(bool recompute = false) {
    clear();
    run(recompute, bench.ctx);
    return results();
  }
  /// Another input and output gradient, by turns.
  void next_input(int step) {
    const Shape xs = x.shape(), ys = dy.shape();
    x = bench.upload(tiled_values(xs[0], xs[1], 100 + step, 1), xs);
    dy = bench.upload(tiled_values(ys[0], ys[1], 200 + step, 0.1), ys);
  }
  int64_t largest_codes() const {
    int64_t largest = 0;
    for (const TestWeight& w : weights)
      largest = std::max(largest, w.weight.n * w.weight.k);
    return largest;
  }
  int64_t all_codes() const {
    int64_t sum = 0;
    for (const TestWeight& w : weights)
      sum += w.weight.n * w.weight.k;
    return sum;
  }
  int64_t columnwise_now() const { return bench.arena.bytes(Category::kColumnwise).now; }

  LayerNormLinear norm_linear(const std::vector<Linear>& layers) const {
    return {norm(), norm_gradients(), layers};
  }
  LayerNormMlp mlp(const std::vector<Linear>& layers) const {
    LayerNormMlp layer;
    layer.norm = norm();
    layer.norm_gradients = norm_gradients();
    layer.activation = options.activation;
    layer.first[0] = layers[0];
    if (is_gated(options.activation))
      layer.first[1] = layers[1];
    layer.down = layers.back();
    return layer;
  }
};

}  // namespace rowshard::testing
