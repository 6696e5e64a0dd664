// Our FP8 products against cuBLASLt's block-scaled one, bit for bit and in time, in one process.
//
//   own_gemm check                a grid of shapes, every tile, both result types, both products
//   own_gemm time [sweep]         gemm_1d2d on the shapes of docs/kernels.md; sweep: every tile
//   own_gemm dgrad [sweep]        the product on the rowwise copy against those on a columnwise one
//   own_gemm one M N K [COUNT]    COUNT launches of each, for profilers and sanitizers
//
// Times are taken while the card is at its power limit: graphs of several launches of one side, all
// operands rotated past the L2, replayed in turn after 0.4 s of load; medians of 30 replays.
//
// bench/gpu1/own_gemm.sh builds it; it needs cuBLASLt and sources of core and fp8, not the tree.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "core/cuda_check.h"
#include "fp8/gemm_1d2d.h"
#include "own_gemm.cuh"

using namespace own_gemm;

namespace {

int failed = 0, checked = 0;
int multiprocessors = 132;

void fill_y(uint8_t* y, const Operands& o, bool f32, bool random) {
  CUDA_CHECK(cudaMemset(y, 0xab, o.y_bytes(f32) + Operands::kGuard));
  if (random && f32) {
    fill_f32<<<256, 256>>>(reinterpret_cast<float*>(y), o.m * o.n, 99);
  } else if (random) {
    fill_bf16<<<256, 256>>>(reinterpret_cast<__nv_bfloat16*>(y), o.m * o.n, 99);
  }
}

/// Runs both and compares every bit, the guard included.
void check(const Operands& o, Lt& lt, const std::string& what, bool f32, float beta,
           const std::function<void()>& ours) {
  static Memory<unsigned long long> counts(2);
  fill_y(o.y.data, o, f32, beta != 0);
  fill_y(o.y_wanted.data, o, f32, beta != 0);
  lt.run(o, beta, nullptr);
  ours();
  // cuBLASLt's padding rows become poison again, so that one comparison covers rows and guard.
  const size_t row_bytes = o.n * (f32 ? 4 : 2);
  CUDA_CHECK(cudaMemset(o.y_wanted.data + o.m * row_bytes, 0xab, (o.rows - o.m) * row_bytes));
  CUDA_CHECK(cudaMemset(counts.data, 0, 16));
  const size_t words = (o.y_bytes(f32) + Operands::kGuard) / 2;
  compare<<<1024, 256>>>(reinterpret_cast<uint16_t*>(o.y.data),
                         reinterpret_cast<uint16_t*>(o.y_wanted.data), words, counts.data);
  unsigned long long result[2];
  CUDA_CHECK(cudaMemcpy(result, counts.data, 16, cudaMemcpyDeviceToHost));
  ++checked;
  if (result[0] != 0 || result[1] <= static_cast<size_t>(o.m * o.n) / 2) {
    ++failed;
    if (failed <= 40) {
      std::printf("FAIL %lldx%lldx%lld %s %s beta %g: %llu of %zu words differ, %llu alive\n",
                  static_cast<long long>(o.m), static_cast<long long>(o.n),
                  static_cast<long long>(o.k), what.c_str(), f32 ? "f32" : "bf16", beta, result[0],
                  words, result[1]);
    }
  }
}

std::string tile_name(int tile) {
  return std::to_string(kGemm1d2dTiles[tile].rows) + "x" +
         std::to_string(kGemm1d2dTiles[tile].cols);
}

/// Every tile of both products. `limit` multiprocessors make a block walk over several tiles.
void check_both(const Operands& o, int kind, bool f32, bool thorough) {
  const std::string scales = " scales " + std::to_string(kind);
  Lt plain(o, f32, false);
  for (int tile = 0; tile < kGemm1d2dTileCount; ++tile) {
    const auto with = [&](bool bias, float beta, int limit) {
      return [&o, f32, tile, bias, beta, limit] {
        rowshard::cuda::gemm_1d2d(o.product(f32, bias, beta), limit, nullptr, tile);
      };
    };
    const std::string name = "gemm " + tile_name(tile) + scales;
    check(o, plain, name, f32, 0, with(false, 0, multiprocessors));
    check(o, plain, name + " limit 20", f32, 0, with(false, 0, 20));
    if (thorough) {
      Lt biased(o, f32, true);
      check(o, biased, name + " bias", f32, 0, with(true, 0, multiprocessors));
      check(o, plain, name, f32, 1, with(false, 1, multiprocessors));
    }
  }
  for (int tile = 0; tile < kGemm1d2dTileCount; ++tile) {
    if (!rowshard::cuda::gemm_1d2d_has(tile, true)) {
      continue;
    }
    const auto with = [&](float beta, int limit) {
      return [&o, f32, tile, beta, limit] {
        rowshard::cuda::gemm_1d2d(o.dgrad(f32, beta), limit, nullptr, tile);
      };
    };
    const std::string name = "dgrad " + tile_name(tile) + scales;
    check(o, plain, name, f32, 0, with(0, multiprocessors));
    check(o, plain, name + " limit 20", f32, 0, with(0, 20));
    if (thorough) {
      check(o, plain, name, f32, 1, with(1, multiprocessors));
    }
  }
}

/// A few outputs against f64, so that both being wrong together would show.
void check_against_f64(const Operands& o) {
  rowshard::cuda::gemm_1d2d(o.product(true, false, 0), multiprocessors, nullptr);
  std::vector<__nv_fp8_e4m3> x(o.m * o.k), w(o.n * o.k);
  std::vector<float> xs(blocks_of(o.k) * up(o.m, 4)), ws(blocks_of(o.n) * up(blocks_of(o.k), 4)),
      y(o.m * o.n);
  const auto down = [](auto& to, const void* from) {
    CUDA_CHECK(cudaMemcpy(to.data(), from, to.size() * sizeof to[0], cudaMemcpyDeviceToHost));
  };
  down(x, o.x.data), down(w, o.w.data), down(xs, o.x_scales.data), down(ws, o.w_scales.data);
  down(y, o.y.data);
  double error = 0, norm = 0;
  for (int64_t i = 0; i < o.m * o.n; i += 37) {
    const int64_t row = i / o.n, col = i % o.n;
    double sum = 0;
    for (int64_t k = 0; k < o.k; ++k) {
      sum += double{static_cast<float>(x[row * o.k + k])} *
             double{static_cast<float>(w[col * o.k + k])} * xs[k / 128 * up(o.m, 4) + row] *
             ws[col / 128 * up(blocks_of(o.k), 4) + k / 128];
    }
    error += (y[i] - sum) * (y[i] - sum);
    norm += sum * sum;
  }
  const double relative = std::sqrt(error / norm);
  std::printf("against f64: relative error %.2e\n", relative);
  ++checked;
  failed += !(relative < 1e-3);
}

void check_all() {
  struct Shape {
    int64_t m, n, k;
  };
  std::vector<Shape> shapes = {{64, 128, 512}};
  for (const int64_t m : {1, 7, 33, 64, 65, 128, 200, 257, 300}) {
    for (const Shape nk : {Shape{0, 128, 512}, Shape{0, 576, 1536}, Shape{0, 1024, 528},
                           Shape{0, 192, 16}, Shape{0, 336, 704}}) {
      shapes.push_back({m, nk.n, nk.k});
    }
  }
  shapes.insert(shapes.end(), {{4096, 4096, 4096},
                               {2048, 4096, 4096},
                               {1000, 14336, 4096},
                               {2048, 4096, 28672},
                               {4096, 576, 1536},
                               {4096, 128, 4096}});
  uint32_t seed = 1;
  for (const Shape& s : shapes) {
    const bool large = s.m * s.n > 1 << 20;
    for (const int kind : {0, 1, 2}) {
      if (large && kind == 1) {
        continue;
      }
      const Operands o(s.m, s.n, s.k, seed += 10, kind);
      for (const bool f32 : {false, true}) {
        check_both(o, kind, f32, kind == 0 && !large);
      }
      CUDA_CHECK(cudaDeviceSynchronize());
    }
    if (failed > 40) {
      break;
    }
  }
  check_against_f64(Operands(200, 336, 704, 5, 0));
  std::printf("check: %d compared, %d failed\n", checked, failed);
}

struct Side {
  std::string name;
  std::function<void(const Operands&, Stream&)> run;
};

/// Medians in microseconds a launch.
std::vector<double> time_sides(const std::vector<Side>& sides, const std::vector<Operands>& sets,
                               double flop) {
  Stream owner(kGpu);
  const cudaStream_t stream = native(owner);
  const int launches =
      static_cast<int>(up(std::clamp<int64_t>(static_cast<int64_t>(1.2e12 / flop), 4, 64),
                          static_cast<int64_t>(sets.size())));
  std::vector<cudaGraphExec_t> graphs;
  for (const Side& side : sides) {
    side.run(sets[0], owner);  // loads the module outside the capture
    CUDA_CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) {
      side.run(sets[i % sets.size()], owner);
    }
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    graphs.push_back(exec);
  }
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  const auto replay = [&](size_t side) {
    float ms = 0;
    CUDA_CHECK(cudaEventRecord(begin, stream));
    CUDA_CHECK(cudaGraphLaunch(graphs[side], stream));
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1e3 / launches;
  };
  for (double load = 0; load < 0.4e6;) {
    for (size_t i = 0; i < sides.size(); ++i) {
      load += replay(i) * launches;
    }
  }
  std::vector<std::vector<double>> times(sides.size());
  for (int r = 0; r < 30; ++r) {
    for (size_t i = 0; i < sides.size(); ++i) {
      const size_t side = (i + r) % sides.size();
      times[side].push_back(replay(side));
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& t : times) {
    std::sort(t.begin(), t.end());
    medians.push_back(t[t.size() / 2]);
  }
  for (cudaGraphExec_t graph : graphs) {
    cudaGraphExecDestroy(graph);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return medians;
}

std::vector<Operands> operand_sets(int64_t m, int64_t n, int64_t k) {
  const double bytes = static_cast<double>(m * k + n * k + 2 * m * n);
  const int count = static_cast<int>(std::clamp(std::ceil(200e6 / bytes), 3.0, 16.0));
  std::vector<Operands> sets;
  for (int i = 0; i < count; ++i) {
    sets.emplace_back(m, n, k, 1000 + 10 * i, 0, false);
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  return sets;
}

void print_times(int64_t m, int64_t n, int64_t k, const std::vector<Side>& sides,
                 const std::vector<double>& us) {
  std::printf("%6lld %6lld %6lld ", static_cast<long long>(m), static_cast<long long>(n),
              static_cast<long long>(k));
  for (size_t i = 0; i < sides.size(); ++i) {
    std::printf(" | %s %.2f us %.0f T", sides[i].name.c_str(), us[i], 2e-6 * m * n * k / us[i]);
    if (i > 0) {
      std::printf(" %.3fx", us[0] / us[i]);
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

void time_shape(int64_t m, int64_t n, int64_t k, bool sweep) {
  const std::vector<Operands> sets = operand_sets(m, n, k);
  Lt lt(sets[0], false, false);
  std::vector<Side> sides = {
      {"cuBLASLt", [&](const Operands& o, Stream& s) { lt.run(o, 0, native(s)); }}};
  const int chosen = rowshard::cuda::choose_gemm_1d2d_tile(m, n, k, multiprocessors);
  for (int tile = 0; tile < kGemm1d2dTileCount; ++tile) {
    if (tile != chosen && (!sweep || (m > 1024 && n > 1024 && kGemm1d2dTiles[tile].rows == 64))) {
      continue;
    }
    sides.push_back(
        {tile_name(tile) + (tile == chosen ? "*" : ""), [tile](const Operands& o, Stream& s) {
           rowshard::cuda::gemm_1d2d(o.product(false, false, 0), multiprocessors, s.native(), tile);
         }});
  }
  print_times(m, n, k, sides, time_sides(sides, sets, 2.0 * m * n * k));
}

/// dx [M, K] = dy [M, N] · w [N, K]
void time_dgrad(int64_t m, int64_t n, int64_t k, bool sweep) {
  const std::vector<Operands> sets = operand_sets(m, k, n);
  Lt lt(sets[0], false, false);
  const auto own = [](const Operands& o, Stream& s) {
    rowshard::cuda::gemm_1d2d(o.product(false, false, 0), multiprocessors, s.native());
  };
  const auto direct = [](int tile) {
    return [tile](const Operands& o, Stream& s) {
      rowshard::cuda::gemm_1d2d(o.dgrad(false, 0), multiprocessors, s.native(), tile);
    };
  };
  std::vector<Side> sides = {
      {"cuBLASLt", [&](const Operands& o, Stream& s) { lt.run(o, 0, native(s)); }},
      {"own", own},
      {"rebuild+own",
       [&](const Operands& o, Stream& s) {
         o.rebuild(s);
         own(o, s);
       }},
      {"rebuild", [](const Operands& o, Stream& s) { o.rebuild(s); }},
      {"direct", direct(-1)}};
  for (int tile = 0; sweep && tile < kGemm1d2dTileCount; ++tile) {
    if (rowshard::cuda::gemm_1d2d_has(tile, true)) {
      sides.push_back({"direct " + tile_name(tile), direct(tile)});
    }
  }
  print_times(m, n, k, sides, time_sides(sides, sets, 2.0 * m * n * k));
}

void time_all(bool sweep) {
  std::printf("# M N K | side, median us a launch, TFLOP/s, speed over cuBLASLt; * chosen\n");
  const int64_t shapes[][3] = {
      {4096, 4096, 4096},  {2048, 4096, 4096},  {8192, 14336, 4096}, {8192, 4096, 14336},
      {16384, 8192, 8192}, {4096, 14336, 4096}, {4096, 4096, 14336}, {4096, 128, 4096},
      {4096, 576, 4096},   {4096, 1024, 4096},  {4096, 128, 1536},   {4096, 576, 1536},
      {4096, 1024, 1536},  {1024, 4096, 4096},  {512, 4096, 4096},   {64, 4096, 4096},
      {8, 4096, 4096},     {1024, 14336, 4096}, {1024, 4096, 14336}, {2048, 1536, 576},
      {2048, 576, 1536},   {300, 1024, 28672},  {64, 4096, 14336},   {512, 1024, 4096}};
  for (const auto& s : shapes) {
    time_shape(s[0], s[1], s[2], sweep);
  }
  // What a launch costs the host.
  const Operands o(64, 128, 128, 1, 0);
  Lt lt(o, false, false);
  for (int side = 0; side < 2; ++side) {
    CUDA_CHECK(cudaDeviceSynchronize());
    const auto now = [] {
      timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
    };
    const double begin = now();
    for (int i = 0; i < 500; ++i) {
      side ? rowshard::cuda::gemm_1d2d(o.product(false, false, 0), multiprocessors, nullptr)
           : lt.run(o, 0, nullptr);
    }
    std::printf("host cost of a call: %s %.2f us\n", side ? "own" : "cuBLASLt",
                (now() - begin) / 500);
  }
}

void dgrad_all(bool sweep) {
  std::printf(
      "# M N K: dx [M, K] = dy [M, N] . w [N, K] | side, median us, TFLOP/s, speed over "
      "cuBLASLt on a resident columnwise copy\n");
  const int64_t shapes[][3] = {{4096, 4096, 4096},  {2048, 4096, 4096},  {1024, 4096, 4096},
                               {512, 4096, 4096},   {4096, 14336, 4096}, {4096, 4096, 14336},
                               {8192, 4096, 4096},  {8192, 14336, 4096}, {8192, 4096, 14336},
                               {16384, 8192, 8192}, {4096, 1024, 4096},  {2048, 14336, 4096},
                               {2048, 4096, 14336}, {2048, 576, 1536},   {2048, 1536, 576}};
  for (const auto& s : shapes) {
    time_dgrad(s[0], s[1], s[2], sweep);
  }
}

int run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  multiprocessors = properties.multiProcessorCount;
  std::printf("# %s, %d multiprocessors, cuBLASLt %zu\n", properties.name, multiprocessors,
              cublasLtGetVersion());
  if (mode == "check") {
    check_all();
  } else if (mode == "time") {
    time_all(argc > 2);
  } else if (mode == "dgrad") {
    dgrad_all(argc > 2);
  } else if (mode == "one" && argc > 4) {
    const Operands o(std::atoll(argv[2]), std::atoll(argv[3]), std::atoll(argv[4]), 1, 0);
    for (int i = 0; i < (argc > 5 ? std::atoi(argv[5]) : 1); ++i) {
      for (const bool f32 : {false, true}) {
        for (int tile = 0; tile < kGemm1d2dTileCount; ++tile) {
          rowshard::cuda::gemm_1d2d(o.product(f32, true, 1), multiprocessors, nullptr, tile);
        }
        for (int tile = 0; tile < kGemm1d2dTileCount; ++tile) {
          if (rowshard::cuda::gemm_1d2d_has(tile, true)) {
            rowshard::cuda::gemm_1d2d(o.dgrad(f32, 1), multiprocessors, nullptr, tile);
          }
        }
      }
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  } else {
    std::printf("own_gemm check | time [sweep] | dgrad [sweep] | one M N K [COUNT]\n");
    return 2;
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  return failed ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("own_gemm: %s\n", error.what());
    return 3;
  }
}
