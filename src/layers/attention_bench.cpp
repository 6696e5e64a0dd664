#include "layers/attention_bench.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/error.h"
#include "core/rng.h"
#include "layers/attention.h"
#if ROWSHARD_CUDA
#include "layers/attention_cuda.h"
#endif

namespace rowshard {
namespace {

double median_us(int repeats, Context& ctx, const std::function<void()>& run) {
  Event begin(ctx.device(), true), end(ctx.device(), true);
  std::vector<double> us;
  for (int r = -2; r < repeats; ++r) {
    begin.record(ctx.stream);
    run();
    end.record(ctx.stream);
    const double once = elapsed_ms(begin, end) * 1e3;
    if (r >= 0)
      us.push_back(once);
  }
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

Tensor random_tensor(Shape shape, uint64_t seed, Context& ctx) {
  const Philox rng{seed, 5};
  std::vector<bf16> values(shape.elements());
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = i < (1u << 20) ? bf16(rng.normal(i)) : values[i * 31 % (1u << 20)];
  Tensor tensor = ctx.arena.tensor(Category::kActivations, "bench", DType::kBF16, shape);
  copy(tensor, ConstView(values.data(), DType::kBF16, shape, kHost), ctx.stream);
  ctx.stream.synchronize();
  return tensor;
}

AttentionMeasurement measure(std::string packing, std::vector<int32_t> bounds, int repeats,
                             Context& ctx) {
  AttentionMeasurement result;
  result.packing = std::move(packing);
  result.tokens = bounds.back();
  result.heads = ctx.device().is_host() ? 4 : 32;
  result.kv_heads = result.heads / 4;
  result.head_dim = 128;
  const Shape q_shape{result.tokens, result.heads, result.head_dim};
  const Shape kv_shape{result.tokens, result.kv_heads, result.head_dim};
  const Segments segments(std::move(bounds), ctx);
  const Tensor q = random_tensor(q_shape, 1, ctx), k = random_tensor(kv_shape, 2, ctx),
               v = random_tensor(kv_shape, 3, ctx), d_o = random_tensor(q_shape, 4, ctx),
               o = random_tensor(q_shape, 5, ctx), dq = random_tensor(q_shape, 6, ctx),
               dk = random_tensor(kv_shape, 7, ctx), dv = random_tensor(kv_shape, 8, ctx);
  const Tensor lse = ctx.arena.tensor(Category::kActivations, "bench.lse", DType::kF32,
                                      {result.tokens, result.heads});
  const double scale = 1 / std::sqrt(static_cast<double>(result.head_dim));
  const auto forward = [&] { attention(o, lse, q, k, v, segments, scale, ctx); };
  const auto backward = [&] {
    attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, segments, scale, ctx);
  };
  ctx.arena.reset_peak();
  const int64_t before = ctx.arena.total().now;
  result.forward_us = median_us(repeats, ctx, forward);
  result.backward_us = median_us(repeats, ctx, backward);
  result.scratch_bytes = ctx.arena.total().peak - before;
  constexpr int kCalls = 10;
  ctx.stream.synchronize();
  const double start = now_seconds();
  for (int i = 0; i < kCalls; ++i) {
    forward();
    backward();
  }
  result.host_us = (now_seconds() - start) * 1e6 / kCalls;
  ctx.stream.synchronize();
#if ROWSHARD_CUDA
  if (ctx.device().is_cuda()) {
    cuda::AttentionOperands x{};
    x.o = o;
    x.lse = lse;
    x.q = q;
    x.k = k;
    x.v = v;
    x.scale = scale;
    result.own_forward_us =
        median_us(repeats, ctx, [&] { cuda::own_attention(x, segments, nullptr, ctx); });
    x.dq = dq;
    x.dk = dk;
    x.dv = dv;
    x.d_o = d_o;
    const Tensor delta =
        ctx.arena.tensor(Category::kWorkspace, "bench.delta", DType::kF32, lse.shape());
    result.own_backward_us =
        median_us(repeats, ctx, [&] { cuda::own_attention(x, segments, delta.as<float>(), ctx); });
  }
#endif
  return result;
}

}  // namespace

std::vector<AttentionMeasurement> bench_attention(int repeats, Context& ctx) {
  std::vector<AttentionMeasurement> results;
  if (ctx.device().is_host()) {
    results.push_back(measure("1 x 256", {0, 256}, repeats, ctx));
    return results;
  }
  for (const int32_t tokens : {1024, 4096, 8192}) {
    results.push_back(measure(message("1 x ", tokens), {0, tokens}, repeats, ctx));
    ctx.arena.trim();
  }
  results.push_back(measure("4 x 1024", {0, 1024, 2048, 3072, 4096}, repeats, ctx));
  // Eleven samples, one of them a single token.
  results.push_back(measure(
      "packed 4096", {0, 1, 38, 101, 612, 613, 900, 1801, 1900, 3333, 3900, 4096}, repeats, ctx));
  results.push_back(measure("1 x 4001", {0, 4001}, repeats, ctx));
  return results;
}

}  // namespace rowshard
