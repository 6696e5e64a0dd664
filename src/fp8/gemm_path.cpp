#include "fp8/gemm_path.h"

#include <atomic>

#include "fp8/gemm_1d2d.h"

namespace rowshard {
namespace {

std::atomic<GemmBackend> backend_now{GemmBackend::kAuto};
std::atomic<int> multiprocessors_now{0};

// Multiprocessors of the cards the measurements are from, H100 and H200.
constexpr int kMultiprocessors = 132;

/// On an H200 at its power limit, bench/results/own-gemm-h200-2026-12-01.log and
/// own-gemm-transposed-h200-2026-12-01.log: our kernel is faster at every shape but one kind.
bool own_gemm_is_faster(int64_t m, int64_t n, int64_t k) {
  const cuda::TileShape tile =
      cuda::kGemm1d2dTiles[cuda::choose_gemm_1d2d_tile(m, n, k, kMultiprocessors)];
  // Few tiles and a very long K: cuBLASLt splits the contraction. 38 % slower at 300 × 1024 ×
  // 28672; still faster at 64 × 4096 × 14336.
  return k <= 16384 || ceil_div(m, tile.rows) * ceil_div(n, tile.cols) > kMultiprocessors * 2 / 3;
}

}  // namespace

const char* to_string(GemmBackend backend) {
  switch (backend) {
    case GemmBackend::kAuto:
      return "auto";
    case GemmBackend::kCublasLt:
      return "cublaslt";
    case GemmBackend::kOwn:
      return "own";
  }
  return "?";
}

void set_gemm_backend(GemmBackend backend) {
  backend_now = backend;
}
GemmBackend gemm_backend() {
  return backend_now.load(std::memory_order_relaxed);
}

void set_gemm_multiprocessors(int count) {
  ROWSHARD_CHECK(count >= 0, ConfigError, "products on ", count, " multiprocessors");
  multiprocessors_now = count;
}
int gemm_multiprocessors() {
  return multiprocessors_now.load(std::memory_order_relaxed);
}

GemmBackend gemm_backend_of(int64_t m, int64_t n, int64_t k) {
  const ConstFp8View x(ConstView(nullptr, DType::kE4M3, {m, k}, kHost), {}, Grouping::k1x128);
  const ConstFp8View w(ConstView(nullptr, DType::kE4M3, {n, k}, kHost), {}, Grouping::k128x128);
  return own_gemm_chosen(gemm_backend(), DType::kBF16, x, w) ? GemmBackend::kOwn
                                                             : GemmBackend::kCublasLt;
}

bool own_gemm_runs(DType y, const ConstFp8View& x, const ConstFp8View& w) {
  return x.grouping == Grouping::k1x128 && w.grouping == Grouping::k128x128 &&
         x.codes.dtype == DType::kE4M3 && w.codes.dtype == DType::kE4M3 &&
         (y == DType::kBF16 || y == DType::kF32) && w.outer() % 16 == 0 && x.inner() % 16 == 0;
}

bool own_gemm_chosen(GemmBackend backend, DType y, const ConstFp8View& x, const ConstFp8View& w) {
  if (backend == GemmBackend::kCublasLt || !own_gemm_runs(y, x, w))
    return false;
  return backend == GemmBackend::kOwn || own_gemm_is_faster(x.outer(), w.outer(), x.inner());
}

const char* to_string(GemmPath path) {
  switch (path) {
    case GemmPath::kBlockScaled:
      return "block-scaled";
    case GemmPath::kMx:
      return "mx";
    case GemmPath::kWidened:
      return "widened";
  }
  return "?";
}

GemmChoice choose_gemm(int capability, Grouping x, Grouping w, int64_t n, int64_t k) {
  if (is_mx(x)) {
    if (capability < 100)
      return {GemmPath::kWidened, "MX products need compute capability 10"};
    if (k % 32 != 0 || n % 8 != 0)
      return {GemmPath::kWidened, "MX products need K % 32 = 0 and N % 8 = 0"};
    return {GemmPath::kMx};
  }
  if (x == Grouping::k128x128 && w == Grouping::k128x128)
    return {GemmPath::kWidened, "cuBLASLt has no product of 128x128 by 128x128"};
  if (capability != 90)
    return {GemmPath::kWidened, "cuBLASLt has products with f32 block scales on Hopper only"};
  return {GemmPath::kBlockScaled};
}

}  // namespace rowshard
