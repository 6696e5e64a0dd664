// Measurements behind `rowshard bench kernels` and `rowshard bench gemm`: plain numbers, no
// printing.
//
// Every figure is a median over `repeats` batches timed by events, each batch a run of launches
// whose operands rotate through more memory than the device's L2 holds. Operands are random: zeros
// run up to 13 % faster. The device's copy bandwidth is measured in the same run, because a ratio
// is only good within one. Absolute times hold for one device only.
#pragma once

#include <string>
#include <vector>

#include "core/arena.h"

namespace rowshard {

struct BenchOptions {
  int repeats = 31;
  int launches = 10;                          // in a batch
  int64_t rotate_bytes = int64_t{200} << 20;  // operands of one batch spread over this much
  int64_t copy_bytes = int64_t{512} << 20;    // moved by the large device copy, both ways counted
  std::vector<std::pair<int64_t, int64_t>> kernel_shapes = {{4096, 4096}, {4096, 14336}};
  std::vector<int64_t> gemm_tokens = {2048, 4096, 8192, 16384};
  std::string only;  // GEMM shapes whose name contains this
};

struct KernelMeasurement {
  std::string name;
  int64_t rows = 0, cols = 0;
  int64_t bytes = 0;  // read and written by one launch, by its definition
  double median_us = 0, fastest_us = 0;
  double gb_per_s = 0;       // of the median
  double copy_gb_per_s = 0;  // a device copy that moves as many bytes, read and write counted
  double of_copy = 0;        // gb_per_s / copy_gb_per_s
};
/// Quantisers, dequantise and rebuild, at every shape; the first entry is a large device copy.
std::vector<KernelMeasurement> bench_fp8_kernels(const BenchOptions& options, Context& ctx);

struct GemmShape {
  std::string name;  // "8B qkv"
  int64_t n = 0, k = 0;
};
/// The weights of Llama-3.1-8B and 70B as gathered (q, k, v fused; gate and up fused), and the
/// narrow k and v of the 8B model alone and fused.
std::vector<GemmShape> llama_gemm_shapes();

struct GemmMeasurement {
  std::string name, product;    // "8B qkv", "fprop" or "dgrad"
  int64_t m = 0, n = 0, k = 0;  // of y = x·wᵀ as run
  double median_us = 0, fastest_us = 0;
  double tflop_per_s = 0;        // of the median
  double host_us = 0;            // of the calling thread, a warm call
  double bare_host_us = 0;       // of a cublasLtMatmul with everything at hand; 0 on the host
  double best_algorithm_us = 0;  // the fastest of cuBLASLt's candidates; 0 on the host
  double of_best = 0;            // fp8_gemm over best_algorithm_us, both on one set of operands
};
std::vector<GemmMeasurement> bench_fp8_gemm(const BenchOptions& options,
                                            const std::vector<GemmShape>& shapes, Context& ctx);

}  // namespace rowshard
