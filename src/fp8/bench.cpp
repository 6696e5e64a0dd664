#include "fp8/bench.h"

#include <algorithm>
#include <functional>

#include "core/rng.h"
#include "fp8/gemm.h"
#include "fp8/gemm_cublaslt.h"
#include "fp8/quantize.h"
#include "fp8/rebuild.h"

namespace rowshard {

namespace {

struct Times {
  double median_us, fastest_us;
};

/// `run(i)` is launch i of a batch; operands should rotate with i.
Times time_batches(const BenchOptions& options, Context& ctx, const std::function<void(int)>& run) {
  Event begin(ctx.device(), true), end(ctx.device(), true);
  std::vector<double> us;
  for (int r = -2; r < options.repeats; ++r) {  // two to warm up
    begin.record(ctx.stream);
    for (int i = 0; i < options.launches; ++i) {
      run(i + std::max(r, 0) * options.launches);
    }
    end.record(ctx.stream);
    const double batch = elapsed_ms(begin, end) * 1e3 / options.launches;
    if (r >= 0) {
      us.push_back(batch);
    }
  }
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.front()};
}

/// Normal values in bf16, each 128×128 tile's worth of memory unlike its neighbour: one random
/// block, laid down again and again at odd lengths.
Tensor random_matrix(int64_t rows, int64_t cols, uint64_t seed, Context& ctx) {
  constexpr int64_t kBlock = (1 << 18) + 37;
  const Philox rng{seed, 17};
  std::vector<bf16> values(std::min(kBlock, rows * cols));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = bf16(rng.normal(i));
  }
  Tensor matrix = ctx.arena.tensor(Category::kActivations, "bench.x", DType::kBF16, {rows, cols});
  const View flat = matrix.view().reshape({rows * cols});
  const auto block = static_cast<int64_t>(values.size());
  copy(flat.slice_rows(0, block), ConstView(values.data(), DType::kBF16, {block}, kHost),
       ctx.stream);
  for (int64_t at = block; at < rows * cols; at += block) {
    const int64_t count = std::min(block, rows * cols - at);
    copy(flat.slice_rows(at, count), flat.slice_rows(0, count), ctx.stream);
  }
  ctx.stream.synchronize();
  return matrix;
}

struct Fp8Memory {
  Tensor codes, scales;
  Fp8View view;

  Fp8Memory(Grouping grouping, int64_t outer, int64_t inner, Context& ctx)
      : codes(
            ctx.arena.tensor(Category::kActivations, "bench.codes", DType::kE4M3, {outer, inner})),
        scales(ctx.arena.tensor(Category::kScales, "bench.scales", scale_dtype(grouping),
                                gemm_scale_shape(grouping, outer, inner))),
        view{codes, scales, grouping} {}
  int64_t bytes() const { return codes.view().bytes() + scales.view().bytes(); }
};

int sets_for(int64_t bytes, const BenchOptions& options) {
  return static_cast<int>(std::clamp<int64_t>(ceil_div(options.rotate_bytes, bytes), 1, 16));
}

KernelMeasurement measure_copy(int64_t bytes, const BenchOptions& options, Context& ctx) {
  KernelMeasurement result;
  result.name = "device copy";
  result.rows = 1;
  result.cols = bytes / 2;
  result.bytes = result.cols * 2;
  std::vector<Tensor> from, to;
  const int sets = sets_for(bytes, options);
  for (int i = 0; i < sets; ++i) {
    from.push_back(
        ctx.arena.tensor(Category::kActivations, "bench.from", DType::kU8, {result.cols}));
    to.push_back(ctx.arena.tensor(Category::kActivations, "bench.to", DType::kU8, {result.cols}));
    fill_bytes(from.back(), static_cast<uint8_t>(37 * i + 11), ctx.stream);
  }
  const Times times =
      time_batches(options, ctx, [&](int i) { copy(to[i % sets], from[i % sets], ctx.stream); });
  result.median_us = times.median_us;
  result.fastest_us = times.fastest_us;
  result.gb_per_s = static_cast<double>(result.bytes) / times.median_us * 1e-3;
  result.copy_gb_per_s = result.gb_per_s;
  result.of_copy = 1;
  return result;
}

/// Operands of one launch.
struct KernelSet {
  Tensor x;
  Fp8Memory rowwise, columnwise;
};

KernelMeasurement measure_kernel(const std::string& name, int64_t rows, int64_t cols,
                                 Grouping grouping, int64_t bytes, const BenchOptions& options,
                                 Context& ctx, const std::function<void(KernelSet&)>& run) {
  std::vector<KernelSet> sets;
  const int count = sets_for(bytes, options);
  for (int i = 0; i < count; ++i) {
    sets.push_back({random_matrix(rows, cols, i + 1, ctx), Fp8Memory(grouping, rows, cols, ctx),
                    Fp8Memory(grouping, cols, rows, ctx)});
    quantize(&sets.back().rowwise.view, &sets.back().columnwise.view, sets.back().x, {},
             ctx.stream);
  }
  KernelMeasurement result;
  result.name = name;
  result.rows = rows;
  result.cols = cols;
  result.bytes = bytes;
  const Times times = time_batches(options, ctx, [&](int i) { run(sets[i % count]); });
  result.median_us = times.median_us;
  result.fastest_us = times.fastest_us;
  result.gb_per_s = static_cast<double>(bytes) / times.median_us * 1e-3;
  return result;
}

}  // namespace

std::vector<KernelMeasurement> bench_fp8_kernels(const BenchOptions& options, Context& ctx) {
  std::vector<KernelMeasurement> results;
  results.push_back(measure_copy(options.copy_bytes, options, ctx));
  for (const auto& [rows, cols] : options.kernel_shapes) {
    const int64_t elements = rows * cols;
    const auto add = [&](const std::string& name, Grouping grouping, int64_t bytes,
                         const std::function<void(KernelSet&)>& run) {
      results.push_back(measure_kernel(name, rows, cols, grouping, bytes, options, ctx, run));
      KernelMeasurement& last = results.back();
      last.copy_gb_per_s = measure_copy(bytes, options, ctx).gb_per_s;
      last.of_copy = last.gb_per_s / last.copy_gb_per_s;
      ctx.arena.trim();
    };
    for (const Grouping grouping :
         {Grouping::k1x128, Grouping::k128x128, Grouping::kMx1x32, Grouping::kMx32x32}) {
      const auto scale_bytes = [&](int64_t outer, int64_t inner) {
        return gemm_scale_shape(grouping, outer, inner).elements() * size_of(scale_dtype(grouping));
      };
      const int64_t row_bytes = elements + scale_bytes(rows, cols);
      const int64_t col_bytes = elements + scale_bytes(cols, rows);
      const std::string what = message("quantize ", to_string(grouping), " from bf16");
      add(what + ", rowwise", grouping, 2 * elements + row_bytes,
          [&](KernelSet& set) { quantize(&set.rowwise.view, nullptr, set.x, {}, ctx.stream); });
      add(what + ", columnwise", grouping, 2 * elements + col_bytes,
          [&](KernelSet& set) { quantize(nullptr, &set.columnwise.view, set.x, {}, ctx.stream); });
      add(what + ", both", grouping, 2 * elements + row_bytes + col_bytes, [&](KernelSet& set) {
        quantize(&set.rowwise.view, &set.columnwise.view, set.x, {}, ctx.stream);
      });
      if (rebuildable(grouping)) {
        add(message("rebuild ", to_string(grouping)), grouping, row_bytes + col_bytes,
            [&](KernelSet& set) {
              rebuild_columnwise(set.columnwise.view, set.rowwise.view, ctx.stream);
            });
      }
      add(message("dequantize ", to_string(grouping), " to bf16"), grouping,
          2 * elements + row_bytes,
          [&](KernelSet& set) { dequantize(set.x, set.rowwise.view, ctx.stream); });
    }
  }
  return results;
}

namespace {

/// The calling thread's time, ours and cublasLtMatmul's alone in turns: medians of batches far
/// smaller than what a stream queues before it blocks.
void measure_host(GemmMeasurement& result, const std::function<void(int)>& run,
                  const ConstFp8View& x, const ConstFp8View& w, const View& y, Context& ctx) {
  constexpr int kBatches = 7, kCalls = 20;
  std::vector<double> ours, bare;
  for (int batch = 0; batch < kBatches; ++batch) {
    ctx.stream.synchronize();
    const double start = now_seconds();
    for (int i = 0; i < kCalls; ++i) {
      run(i);
    }
    ours.push_back((now_seconds() - start) * 1e6 / kCalls);
#if ROWSHARD_CUDA
    if (ctx.device().is_cuda()) {
      ctx.stream.synchronize();
      bare.push_back(cuda::time_bare_call(y, x, w, kCalls, ctx));
    }
#endif
  }
  ctx.stream.synchronize();
  std::sort(ours.begin(), ours.end());
  result.host_us = ours[kBatches / 2];
  if (!bare.empty()) {
    std::sort(bare.begin(), bare.end());
    result.bare_host_us = bare[kBatches / 2];
  }
  (void)x, (void)w, (void)y;  // without CUDA
}

#if ROWSHARD_CUDA
/// As time_gemm_algorithms does it: one set of operands, an event pair a call, the median in
/// microseconds.
double time_alone(int repeats, const std::function<void(int)>& run, Context& ctx) {
  Event begin(ctx.device(), true), end(ctx.device(), true);
  std::vector<double> us;
  for (int r = -2; r < repeats; ++r) {
    begin.record(ctx.stream);
    run(0);
    end.record(ctx.stream);
    const double once = elapsed_ms(begin, end) * 1e3;
    if (r >= 0) {
      us.push_back(once);
    }
  }
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}
#endif

}  // namespace

std::vector<GemmShape> llama_gemm_shapes() {
  return {{"8B qkv", 6144, 4096},       {"8B o", 4096, 4096},      {"8B gate_up", 28672, 4096},
          {"8B down", 4096, 14336},     {"70B qkv", 10240, 8192},  {"70B o", 8192, 8192},
          {"70B gate_up", 57344, 8192}, {"70B down", 8192, 28672}, {"8B k or v", 1024, 4096},
          {"8B k+v", 2048, 4096}};
}

std::vector<GemmMeasurement> bench_fp8_gemm(const BenchOptions& options,
                                            const std::vector<GemmShape>& shapes, Context& ctx) {
  struct Set {
    Fp8Memory x, w;
    Tensor y;
  };
  std::vector<GemmMeasurement> results;
  for (const GemmShape& shape : shapes) {
    if (shape.name.find(options.only) == std::string::npos) {
      continue;
    }
    for (const bool dgrad : {false, true}) {
      for (const int64_t m : options.gemm_tokens) {
        GemmMeasurement result;
        result.name = shape.name;
        result.product = dgrad ? "dgrad" : "fprop";
        result.m = m;
        result.n = dgrad ? shape.k : shape.n;
        result.k = dgrad ? shape.n : shape.k;
        const int64_t n = result.n, k = result.k;
        std::vector<Set> sets;
        const int count = sets_for(m * k + n * k + 2 * m * n, options);
        for (int i = 0; i < count; ++i) {
          sets.push_back(
              {Fp8Memory(Grouping::k1x128, m, k, ctx), Fp8Memory(Grouping::k128x128, n, k, ctx),
               ctx.arena.tensor(Category::kActivations, "bench.y", DType::kBF16, {m, n})});
          Set& set = sets.back();
          quantize(&set.x.view, nullptr, random_matrix(m, k, 2 * i + 1, ctx), {}, ctx.stream);
          quantize(&set.w.view, nullptr, random_matrix(n, k, 2 * i + 2, ctx), {}, ctx.stream);
        }
        const auto run = [&](int i) {
          const Set& set = sets[i % count];
          fp8_gemm(set.y, set.x.view, set.w.view, {}, ctx);
        };
        const Times times = time_batches(options, ctx, run);
        result.median_us = times.median_us;
        result.fastest_us = times.fastest_us;
        result.tflop_per_s =
            2.0 * static_cast<double>(m * n) * static_cast<double>(k) / times.median_us * 1e-6;
        measure_host(result, run, sets.front().x.view, sets.front().w.view, sets.front().y, ctx);
#if ROWSHARD_CUDA
        if (ctx.device().is_cuda()) {
          const Set& set = sets.front();
          const std::vector<double> candidates =
              cuda::time_gemm_algorithms(set.y, set.x.view, set.w.view, options.repeats, ctx);
          result.best_algorithm_us = *std::min_element(candidates.begin(), candidates.end());
          result.of_best = time_alone(options.repeats, run, ctx) / result.best_algorithm_us;
        }
#endif
        results.push_back(result);
        sets.clear();
        ctx.arena.trim();
      }
    }
  }
  return results;
}

}  // namespace rowshard
