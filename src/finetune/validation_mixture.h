// The mixture layer that `validate grouped` spreads over ranks: five experts of uneven rows, every
// value a function of its place, so that a rank makes its part of anything without the rest.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "fp8/quantize.h"
#include "layers/activation.h"
#include "layers/grouped_linear.h"
#include "layers/tensor_parallel.h"
#include "model/decoder_slice.h"

namespace rowshard::mixture {

using Doubles = std::vector<double>;

inline constexpr int kExperts = 5;  // which no number of ranks above 1 here divides
inline constexpr int64_t kShare = 24, kHidden = 256, kAdapterRank = 8;
inline constexpr float kScale = 0.5f;

enum Role { kGate, kUp, kDown };
enum class Base { kFrozenFp8, kTrainedFp8, kTrainedPlain };
inline const char* to_string(Base base) {
  return base == Base::kFrozenFp8    ? "frozen FP8 with adapters"
         : base == Base::kTrainedFp8 ? "trained FP8"
                                     : "trained plain";
}

/// Rows that a rank has for an expert. Expert 2 has none at all, others have none here and there;
/// each rank's add up to its share.
inline std::vector<int64_t> row_counts(int ranks) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t left = kShare;
    for (int expert = 0; expert < kExperts; ++expert) {
      int64_t rows = expert == 2 ? 0 : (3 * rank + 5 * expert) % 9;
      rows = expert + 1 == kExperts ? left : std::min(rows, left);
      counts.push_back(rows);
      left -= rows;
    }
  }
  return counts;
}

/// Element (row, col) of what `stream` names: every 128x128 tile has its own magnitude.
inline float element(uint64_t stream, int64_t row, int64_t col, int64_t cols, float scale) {
  const int magnitude = static_cast<int>((row / 128 * 3 + col / 128) % 5) - 2;
  return std::ldexp(scale * Philox{17, stream}.normal(row * cols + col), magnitude);
}

struct Bench {
  Arena arena;
  Stream stream;
  Context ctx{arena, stream};
  DType dtype;

  Bench(Device device, DType type) : arena(device), stream(device), dtype(type) {
    arena.set_poison(true);
  }
  Tensor empty(int64_t rows, int64_t cols) {
    return arena.tensor(Category::kActivations, "grouped", dtype, {rows, cols});
  }
  Tensor zeros(int64_t rows, int64_t cols) {
    Tensor zero = arena.tensor(Category::kAdapter, "grouped",
                               dtype == DType::kF64 ? DType::kF64 : DType::kF32, {rows, cols});
    fill_bytes(zero, 0, stream);
    return zero;
  }
  Tensor upload(const std::vector<float>& values, Shape shape, DType as) {
    Tensor tensor = arena.tensor(Category::kActivations, "grouped", as, shape);
    Tensor wide = arena.tensor(Category::kWorkspace, "grouped", DType::kF32, shape);
    copy(wide, ConstView(values.data(), DType::kF32, shape, kHost), stream);
    convert(tensor, wide, stream);
    stream.synchronize();
    return tensor;
  }
  /// Rows `rows`, columns `cols` of the matrix that `seed` names.
  Tensor values(uint64_t seed, Range rows, Range cols, int64_t width, float scale, DType as) {
    std::vector<float> part;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int64_t c = cols.begin; c < cols.end; ++c)
        part.push_back(element(seed, r, c, width, scale));
    }
    return upload(part, {rows.size(), cols.size()}, as);
  }
  std::vector<std::byte> bytes(const ConstView& view) {
    std::vector<std::byte> result(view.bytes());
    copy(View(result.data(), view.dtype, view.shape, kHost), view, stream);
    stream.synchronize();
    return result;
  }
  Doubles doubles(const ConstView& view) {
    if (view.elements() == 0)
      return {};
    Tensor wide = arena.tensor(Category::kWorkspace, "grouped", DType::kF32, view.shape);
    convert(wide, view, stream);
    std::vector<float> result(view.elements());
    std::memcpy(result.data(), bytes(wide).data(), result.size() * sizeof(float));
    return {result.begin(), result.end()};
  }
};

inline DType activation_dtype(const Communicator& group) {
  return group.device().is_cuda() ? DType::kBF16 : DType::kF32;
}

/// One expert's weight in one role, or the part of it that a rank holds.
struct Expert {
  std::unique_ptr<Fp8Matrix> matrix;
  std::unique_ptr<Fp8Workspace> workspace;
  Tensor plain, bias, gradient, a, b, grad_a, grad_b;
  LinearWeight weight;
  LoraFactors lora;
};

/// The experts [first, first + count) of a mixture's MLP: gate and up [F, H], down [H, F].
class Mlp {
 public:
  /// `ffn`: the features that this rank holds, of `width`.
  Mlp(Bench& bench, int first, int count, Range ffn, int64_t width, Base base) {
    for (const Role role : {kGate, kUp, kDown}) {
      for (int e = first; e < first + count; ++e) {
        experts_[role].push_back(std::make_unique<Expert>());
        make(*experts_[role].back(), bench, e, role, ffn, width, base);
      }
    }
  }

  std::vector<Linear> linears(Role role, bool adapters, float dropout_rate, int64_t first_row) {
    std::vector<Linear> result;
    for (const auto& expert : experts_[role]) {
      Dropout dropout;
      dropout.rate = dropout_rate;
      dropout.random = {5, static_cast<uint64_t>(role)};
      dropout.first_token = first_row;
      result.push_back({.weight = &expert->weight,
                        .lora = adapters ? &expert->lora : nullptr,
                        .dropout = dropout});
    }
    return result;
  }
  Expert& expert(Role role, int index) { return *experts_[role][index]; }
  int count() const { return static_cast<int>(experts_[0].size()); }

 private:
  static void make(Expert& x, Bench& bench, int e, Role role, Range ffn, int64_t width, Base base) {
    const Range hidden{0, kHidden}, rank{0, kAdapterRank};
    const Range rows = role == kDown ? hidden : ffn, cols = role == kDown ? ffn : hidden;
    const int64_t k = role == kDown ? width : kHidden;
    const auto seed = static_cast<uint64_t>(100 * (role + 1) + 10 * e);
    x.weight.name = message("expert ", e, role == kGate ? " gate" : role == kUp ? " up" : " down");
    x.weight.n = rows.size();
    x.weight.k = cols.size();
    x.plain = bench.values(seed, rows, cols, k, 0.06f, DType::kBF16);
    const Device device = bench.arena.device();
    const Shape shape{rows.size(), cols.size()};
    if (base == Base::kFrozenFp8) {
      Tensor codes = bench.arena.tensor(Category::kRowwiseShard, "codes", DType::kE4M3, shape);
      Tensor scales = bench.arena.tensor(Category::kScales, "scales", DType::kF32,
                                         gemm_scale_shape(Grouping::k128x128, shape[0], shape[1]));
      const Fp8View view{codes, scales, Grouping::k128x128};
      quantize(&view, nullptr, x.plain, {}, bench.stream);
      x.matrix = std::make_unique<Fp8Matrix>(x.weight.name, shape[0], shape[1], Grouping::k128x128,
                                             device);
      x.matrix->own_rowwise(std::move(codes), std::move(scales));
      x.weight.fp8 = x.matrix.get();
    } else {
      x.weight.plain = x.plain;
      x.gradient = bench.zeros(shape[0], shape[1]);
      x.weight.gradient = x.gradient;
      if (base == Base::kTrainedFp8) {
        x.workspace.reset(new Fp8Workspace{
            Fp8Matrix(x.weight.name, shape[0], shape[1], Grouping::k128x128, device)});
        x.weight.workspace = x.workspace.get();
      }
    }
    x.bias = bench.values(seed + 3, {0, 1}, rows, rows.end, 1, bench.dtype);
    x.weight.bias = x.bias.view().reshape({rows.size()});
    x.a = bench.values(seed + 1, rank, cols, k, 0.1f, bench.dtype);
    x.b = bench.values(seed + 2, rows, rank, kAdapterRank, 0.1f, bench.dtype);
    x.grad_a = bench.zeros(kAdapterRank, cols.size());
    x.grad_b = bench.zeros(rows.size(), kAdapterRank);
    x.lora = {x.a, x.b, x.grad_a, x.grad_b, kScale};
  }

  std::vector<std::unique_ptr<Expert>> experts_[3];
};

/// The MLP of these experts forward and backward, their rows one after another.
inline void run_mlp(Bench& bench, Mlp& mlp, const View& y, const View& dx, const ConstView& x,
                    const ConstView& dy, std::span<const int64_t> rows, int64_t width,
                    int64_t first_row) {
  const int64_t total = x.dim(0);
  const auto gate = mlp.linears(kGate, true, 0.3f, first_row);
  const auto up = mlp.linears(kUp, true, 0.3f, first_row);
  const auto down = mlp.linears(kDown, true, 0.3f, first_row);
  GroupedLinearSaved saved_gate, saved_up, saved_down;
  const Tensor g = bench.empty(total, width), u = bench.empty(total, width),
               h = bench.empty(total, width), dh = bench.empty(total, width),
               dg = bench.empty(total, width);
  grouped_linear_forward(g, x, rows, gate, &saved_gate, bench.ctx);
  grouped_linear_forward(u, x, rows, up, &saved_up, bench.ctx);
  activation_forward(h, nullptr, g, u, Activation::kSwiGlu, bench.stream);
  grouped_linear_forward(y, h, rows, down, &saved_down, bench.ctx);
  grouped_linear_backward(dh, dy, saved_down, down, false, bench.ctx);
  activation_backward(dg, dh, dh, g, u, Activation::kSwiGlu, bench.stream);
  grouped_linear_backward(dx, dg, saved_gate, gate, false, bench.ctx);
  grouped_linear_backward(dx, dh, saved_up, up, true, bench.ctx);
}

inline constexpr uint64_t kX = 1, kDy = 2;
inline const Range kAllHidden{0, kHidden};

/// Experts cut over ranks against f64. Collective; returns what is wrong on this rank, or nothing,
/// and leaves figures in `detail`.
std::string cut_experts(Communicator& group, Stream& stream, std::string& detail);

}  // namespace rowshard::mixture
