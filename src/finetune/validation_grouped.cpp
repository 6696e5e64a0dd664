#include "finetune/validation_grouped.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "fp8/quantize.h"
#include "layers/activation.h"
#include "layers/expert_parallel.h"
#include "layers/grouped_linear.h"
#include "layers/parallel_linear.h"
#include "model/decoder_slice.h"

namespace rowshard {

namespace {

using Doubles = std::vector<double>;

constexpr int kExperts = 5;  // which no number of ranks above 1 here divides
constexpr int64_t kShare = 24, kHidden = 256, kAdapterRank = 8;
constexpr float kScale = 0.5f;

enum Role { kGate, kUp, kDown };
enum class Base { kFrozenFp8, kTrainedFp8, kTrainedPlain };
const char* to_string(Base base) {
  return base == Base::kFrozenFp8    ? "frozen FP8 with adapters"
         : base == Base::kTrainedFp8 ? "trained FP8"
                                     : "trained plain";
}

/// Rows that a rank has for an expert. Expert 2 has none at all, others have none here and there;
/// each rank's add up to its share.
std::vector<int64_t> row_counts(int ranks) {
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
float element(uint64_t stream, int64_t row, int64_t col, int64_t cols, float scale) {
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

DType activation_dtype(const Communicator& group) {
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
void run_mlp(Bench& bench, Mlp& mlp, const View& y, const View& dx, const ConstView& x,
             const ConstView& dy, std::span<const int64_t> rows, int64_t width, int64_t first_row) {
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

constexpr uint64_t kX = 1, kDy = 2;
const Range kAllHidden{0, kHidden};

/// Experts over ranks: the bits of one rank that holds them all.
std::string whole_experts(TensorParallel& tp, Base base, std::string& detail) {
  const int ranks = tp.size(), rank = tp.rank();
  Bench bench(tp.group.device(), activation_dtype(tp.group));
  const std::vector<int64_t> counts = row_counts(ranks);
  const int64_t width = 384, total = kShare * ranks;
  const Range ffn{0, width}, own{kShare * rank, kShare * (rank + 1)};

  ExpertPlaces place(counts, kExperts, tp);
  Mlp here(bench, place.first_expert(), place.experts(), ffn, width, base);
  const Tensor x = bench.values(kX, own, kAllHidden, kHidden, 1, bench.dtype);
  const Tensor dy = bench.values(kDy, own, kAllHidden, kHidden, 0.1f, bench.dtype);
  const Tensor y = bench.empty(kShare, kHidden), dx = bench.empty(kShare, kHidden);
  {
    const int64_t rows = place.expert_rows();
    const Tensor ex = bench.empty(rows, kHidden), edy = bench.empty(rows, kHidden),
                 ey = bench.empty(rows, kHidden), edx = bench.empty(rows, kHidden);
    place.to_experts(ex, x, bench.ctx);
    place.to_experts(edy, dy, bench.ctx);
    run_mlp(bench, here, ey, edx, ex, edy, place.rows(), width, place.first_row());
    place.from_experts(y, ey, bench.ctx);
    place.from_experts(dx, edx, bench.ctx);
  }

  // One rank: all rows, expert by expert, within that rank by rank.
  Mlp all(bench, 0, kExperts, ffn, width, base);
  std::vector<int64_t> rows(kExperts), order;  // order: rows of the ranks' tensors
  for (int e = 0; e < kExperts; ++e) {
    for (int r = 0; r < ranks; ++r) {
      int64_t first = kShare * r;
      for (int before = 0; before < e; ++before)
        first += counts[r * kExperts + before];
      for (int64_t i = 0; i < counts[r * kExperts + e]; ++i)
        order.push_back(first + i);
      rows[e] += counts[r * kExperts + e];
    }
  }
  const auto in_order = [&](uint64_t seed, float scale) {
    const Tensor whole = bench.values(seed, {0, total}, kAllHidden, kHidden, scale, bench.dtype);
    Tensor sorted = bench.empty(total, kHidden);
    for (int64_t i = 0; i < total; ++i)
      copy(sorted.view().slice_rows(i, 1), whole.view().slice_rows(order[i], 1), bench.stream);
    bench.stream.synchronize();
    return sorted;
  };
  const Tensor one_x = in_order(kX, 1), one_dy = in_order(kDy, 0.1f);
  const Tensor one_y = bench.empty(total, kHidden), one_dx = bench.empty(total, kHidden);
  run_mlp(bench, all, one_y, one_dx, one_x, one_dy, rows, width, 0);

  int64_t compared = 0;
  const auto differ = [&](const ConstView& a, const ConstView& b) {
    compared += a.bytes();
    return bench.bytes(a) != bench.bytes(b);
  };
  for (int64_t i = 0; i < total; ++i) {
    const int64_t row = order[i] - own.begin;
    if (row < 0 || row >= kShare)
      continue;
    if (differ(y.view().slice_rows(row, 1), one_y.view().slice_rows(i, 1)))
      return message("y of row ", row, " is not one rank's");
    if (differ(dx.view().slice_rows(row, 1), one_dx.view().slice_rows(i, 1)))
      return message("dx of row ", row, " is not one rank's");
  }
  for (const Role role : {kGate, kUp, kDown}) {
    for (int e = 0; e < here.count(); ++e) {
      const Expert& mine = here.expert(role, e);
      const Expert& one = all.expert(role, place.first_expert() + e);
      if (differ(mine.grad_a, one.grad_a) || differ(mine.grad_b, one.grad_b))
        return message(mine.weight.name, ": the adapter's gradients are not one rank's");
      if (mine.gradient && differ(mine.gradient, one.gradient))
        return message(mine.weight.name, ": the weight's gradient is not one rank's");
      if (mine.matrix && mine.matrix->usage().columnwise)
        return message(mine.weight.name, " keeps its columnwise copy");
    }
  }
  detail = message(kExperts, " experts over ", ranks, " ranks, every bit of y, dx and gradients (",
                   compared, " bytes)");
  return "";
}

// -- experts that are cut

/// Of one layer with experts in f64: values, or with |operands| what bounds their rounding.
struct Exact {
  Doubles y, dx;
  std::vector<Doubles> grad_a, grad_b;
};

/// [ranks x experts] groups in their order, one layer's whole experts. x8 and dy8 are what the base
/// products read; x and dy what the adapter does.
Exact exact(Bench& bench, Mlp& mlp, Role role, const Tensor& x8, const Tensor& x, const Tensor& dy8,
            const Tensor& dy, std::span<const int64_t> counts, float rate, bool magnitudes) {
  Bench wide(kHost, DType::kF64);
  const auto upload = [&](const ConstView& view) {
    Doubles values = bench.doubles(view);
    if (magnitudes) {
      for (double& value : values)
        value = std::abs(value);
    }
    Tensor tensor = wide.empty(view.dim(0), view.dim(1));
    std::memcpy(tensor.view().data, values.data(), values.size() * sizeof(double));
    return tensor;
  };
  const auto values = [&](const Tensor& tensor) {
    Doubles result(tensor.view().elements());
    std::memcpy(result.data(), tensor.view().data, result.size() * sizeof(double));
    return result;
  };
  const Tensor bx = upload(x8), ax = upload(x), bdy = upload(dy8), ady = upload(dy);
  const int64_t total = ax.view().dim(0), n = ady.view().dim(1), k = ax.view().dim(1);
  const Tensor y = wide.empty(total, n), dx = wide.empty(total, k);
  Exact result;
  std::vector<Tensor> weights, biases, as, bs, grad_as, grad_bs;
  std::vector<LinearWeight> plain(kExperts);
  for (int e = 0; e < kExperts; ++e) {
    Expert& expert = mlp.expert(role, e);
    const Tensor decoded = bench.arena.tensor(Category::kWorkspace, "grouped", DType::kF32, {n, k});
    dequantize(decoded, expert.matrix->rowwise(), bench.stream);
    weights.push_back(upload(decoded));
    biases.push_back(upload(expert.bias));
    as.push_back(upload(expert.a));
    bs.push_back(upload(expert.b));
    grad_as.push_back(wide.zeros(kAdapterRank, k));
    grad_bs.push_back(wide.zeros(n, kAdapterRank));
    plain[e].name = expert.weight.name;
    plain[e].n = n;
    plain[e].k = k;
    plain[e].plain = weights[e];
    plain[e].bias = biases[e].view().reshape({n});
  }
  std::vector<Linear> groups;
  for (size_t i = 0; i < counts.size(); ++i)
    groups.push_back({.weight = &plain[i % kExperts]});
  GroupedLinearSaved saved;
  grouped_linear_forward(y, bx, counts, groups, &saved, wide.ctx);
  grouped_linear_backward(dx, bdy, saved, groups, false, wide.ctx);
  int64_t first = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const size_t e = i % kExperts;
    const LoraFactors lora{as[e], bs[e], grad_as[e], grad_bs[e], kScale};
    Dropout dropout;
    dropout.rate = rate;
    dropout.random = {5, static_cast<uint64_t>(role)};
    dropout.first_token = first;
    LoraSaved lora_saved;
    const auto part = [&](const auto& whole) { return whole.view().slice_rows(first, counts[i]); };
    if (counts[i] > 0) {
      lora_forward(part(y), part(ax), lora, dropout, &lora_saved, wide.ctx);
      lora_backward(part(dx), part(ady), part(ax), lora, lora_saved, wide.ctx);
    }
    first += counts[i];
  }
  result.y = values(y);
  result.dx = values(dx);
  for (int e = 0; e < kExperts; ++e) {
    result.grad_a.push_back(values(grad_as[e]));
    result.grad_b.push_back(values(grad_bs[e]));
  }
  return result;
}

/// What a rank's rows and columns [rows, cols] of a [·, width] matrix are.
Doubles cut(const Doubles& whole, int64_t width, Range rows, Range cols) {
  Doubles part;
  for (int64_t r = rows.begin; r < rows.end; ++r)
    part.insert(part.end(), whole.begin() + r * width + cols.begin,
                whole.begin() + r * width + cols.end);
  return part;
}

/// The worst |got − want| / magnitude.
double worst(const Doubles& got, const Doubles& want, const Doubles& magnitudes) {
  double most = got.size() == want.size() ? 0 : INFINITY;
  for (size_t i = 0; i < got.size() && i < want.size(); ++i) {
    const double apart = std::abs(got[i] - want[i]);
    most = apart <= 1e-30 ? most : std::max(most, apart / (magnitudes[i] + 1e-30));
    if (std::isnan(got[i]))
      return INFINITY;
  }
  return most;
}

class CutExperts {
 public:
  CutExperts(Communicator& group, Stream& stream)
      : tp_{group, stream, true, true, false, {}},
        bench_(group.device(), activation_dtype(group)),
        counts_(row_counts(group.size())),
        width_(128 * (group.size() + 1)),
        total_(kShare * group.size()),
        ffn_(near_equal_part(width_, 128, group.size(), group.rank())),
        all_{0, total_},
        own_{kShare * group.rank(), kShare * (group.rank() + 1)} {}

  std::string run(std::string& detail) {
    double most = 0;
    const double bound = this->bound();
    for (const bool sequence : {true, false}) {
      tp_.sequence = sequence;
      for (const bool wide_sums : {false, true}) {
        if (wide_sums && bench_.dtype == DType::kF32)
          continue;  // they are f32 as it is
        tp_.wide_sums = wide_sums;
        std::vector<std::vector<std::byte>> left[2];
        for (const bool overlap : {true, false}) {
          tp_.overlap = overlap;
          for (const auto& layer : {&CutExperts::column, &CutExperts::row}) {
            const std::string wrong = (this->*layer)(left[overlap], most);
            if (!wrong.empty())
              return wrong;
          }
        }
        if (left[0] != left[1])
          return "overlap changes a bit";
        if (most > bound)
          return message("off by ", most, " of the sum of magnitudes; bound ", bound);
      }
    }
    detail = message("FFN of ", width_ / 128,
                     " blocks; y of the frozen experts is one rank's; the ", "rest within ", most,
                     " of the sum of magnitudes (bound ", bound, "); overlap changes no bit");
    return "";
  }

 private:
  /// Of the sum of the magnitudes of its terms: 6 + p roundings to T of intermediate results and
  /// partial sums, in f32 one a term, and what FP8 products on tensor cores drop.
  double bound() const {
    const bool cuda = bench_.dtype == DType::kBF16;
    const int64_t terms = std::max({width_, kHidden, total_});
    return (cuda ? 0x1p-9 : 0x1p-24) * (6 + tp_.size()) + 0x1p-24 * static_cast<double>(terms) +
           (cuda ? 1e-3 : 0);
  }
  /// A whole tensor as FP8 products see it.
  Tensor through_fp8(const Tensor& x) {
    const int64_t rows = x.view().dim(0), cols = x.view().dim(1);
    const Tensor codes = bench_.arena.tensor(Category::kWorkspace, "c", DType::kE4M3, {rows, cols});
    const Tensor scales = bench_.arena.tensor(Category::kWorkspace, "s", DType::kF32,
                                              gemm_scale_shape(Grouping::k1x128, rows, cols));
    const Fp8View view{codes, scales, Grouping::k1x128};
    quantize(&view, nullptr, x, {}, bench_.stream);
    Tensor decoded = bench_.arena.tensor(Category::kWorkspace, "d", DType::kF32, {rows, cols});
    dequantize(decoded, view, bench_.stream);
    return decoded;
  }
  Range residual() const { return tp_.sequence ? own_ : all_; }
  /// A gradient of a factor that every rank holds whole.
  Doubles replicated(const Tensor& gradient) {
    if (tp_.sequence)
      tp_.group.all_reduce(gradient, Reduction::kSum, bench_.stream);
    return bench_.doubles(gradient);
  }
  void keep(std::vector<std::vector<std::byte>>& left, std::initializer_list<const Tensor*> all) {
    for (const Tensor* tensor : all)
      left.push_back(bench_.bytes(*tensor));
  }

  std::string column(std::vector<std::vector<std::byte>>& left, double& most) {
    Mlp part(bench_, 0, kExperts, ffn_, width_, Base::kFrozenFp8);
    Mlp whole(bench_, 0, kExperts, {0, width_}, width_, Base::kFrozenFp8);
    // Gate has adapters, up has none: nothing of its y crosses ranks.
    std::vector<Linear> layers = part.linears(kGate, true, 0.3f, 0);
    const std::vector<Linear> up = part.linears(kUp, false, 0, 0);
    layers.insert(layers.end(), up.begin(), up.end());
    const Tensor x = bench_.values(kX, residual(), kAllHidden, kHidden, 1, bench_.dtype);
    const Tensor all_x = bench_.values(kX, all_, kAllHidden, kHidden, 1, bench_.dtype);
    const Tensor g = bench_.empty(total_, ffn_.size()), u = bench_.empty(total_, ffn_.size());
    const Tensor dx = bench_.empty(residual().size(), kHidden);
    const Tensor dg = bench_.values(3, all_, ffn_, width_, 0.1f, bench_.dtype),
                 du = bench_.values(4, all_, ffn_, width_, 0.1f, bench_.dtype);
    const View ys[] = {g, u};
    const ConstView dys[] = {dg, du};
    ParallelSaved saved;
    column_parallel_forward(ys, x, layers, &saved, tp_, bench_.ctx, counts_);
    column_parallel_backward(dx, dys, x, layers, saved, tp_, bench_.ctx, counts_);
    keep(left, {&g, &u, &dx});

    std::vector<Linear> groups;
    for (size_t i = 0; i < counts_.size(); ++i)
      groups.push_back(up[i % kExperts]);
    const Tensor one = bench_.empty(total_, ffn_.size());
    grouped_linear_forward(one, all_x, counts_, groups, nullptr, bench_.ctx);
    if (bench_.bytes(one) != bench_.bytes(u))
      return "y of frozen experts is not one rank's product with the same rows of W";

    const Tensor x8 = through_fp8(all_x), none = bench_.empty(0, 0);
    const auto of = [&](Role role, uint64_t seed, bool magnitudes) {
      const Tensor dy = bench_.values(seed, all_, {0, width_}, width_, 0.1f, bench_.dtype);
      return exact(bench_, whole, role, x8, all_x, through_fp8(dy), dy, counts_, 0.3f, magnitudes);
    };
    Exact want = of(kGate, 3, false), most_of = of(kGate, 3, true);
    most = std::max(most, worst(bench_.doubles(g), cut(want.y, width_, all_, ffn_),
                                cut(most_of.y, width_, all_, ffn_)));
    // dx is of both layers, of which up has no adapter.
    for (Exact* sum : {&want, &most_of}) {
      const Doubles base = without_adapter(whole, kUp, 4, sum == &most_of);
      for (size_t i = 0; i < base.size(); ++i)
        sum->dx[i] += base[i];
    }
    most = std::max(most, worst(bench_.doubles(dx), cut(want.dx, kHidden, residual(), kAllHidden),
                                cut(most_of.dx, kHidden, residual(), kAllHidden)));
    const Range rank{0, kAdapterRank};
    for (int e = 0; e < kExperts; ++e) {
      Expert& expert = part.expert(kGate, e);
      keep(left, {&expert.grad_a, &expert.grad_b});
      most = std::max(most, worst(replicated(expert.grad_a), want.grad_a[e], most_of.grad_a[e]));
      most = std::max(
          most, worst(bench_.doubles(expert.grad_b), cut(want.grad_b[e], kAdapterRank, ffn_, rank),
                      cut(most_of.grad_b[e], kAdapterRank, ffn_, rank)));
      if (expert.matrix->usage().columnwise || part.expert(kUp, e).matrix->usage().columnwise)
        return "a frozen expert keeps its columnwise copy";
    }
    return "";
  }

  /// dx of a layer without adapters.
  Doubles without_adapter(Mlp& whole, Role role, uint64_t seed, bool magnitudes) {
    const Tensor dy = bench_.values(seed, all_, {0, width_}, width_, 0.1f, bench_.dtype);
    Tensor zero_x = bench_.empty(total_, kHidden), zero_dy = bench_.empty(total_, width_);
    fill_bytes(zero_x, 0, bench_.stream);
    fill_bytes(zero_dy, 0, bench_.stream);
    return exact(bench_, whole, role, zero_x, zero_x, through_fp8(dy), zero_dy, counts_, 0,
                 magnitudes)
        .dx;
  }

  std::string row(std::vector<std::vector<std::byte>>& left, double& most) {
    Mlp part(bench_, 0, kExperts, ffn_, width_, Base::kFrozenFp8);
    Mlp whole(bench_, 0, kExperts, {0, width_}, width_, Base::kFrozenFp8);
    std::vector<Linear> experts = part.linears(kDown, true, 0.3f, 0);
    for (Linear& expert : experts) {
      expert.dropout.first_column = ffn_.begin;
      expert.dropout.columns = width_;
    }
    const Tensor x = bench_.values(kX, all_, ffn_, width_, 1, bench_.dtype);
    const Tensor dy = bench_.values(kDy, residual(), kAllHidden, kHidden, 0.1f, bench_.dtype);
    const Tensor y = bench_.empty(residual().size(), kHidden);
    const Tensor dx = bench_.empty(total_, ffn_.size());
    ParallelSaved saved;
    row_parallel_forward(y, x, experts, &saved, tp_, bench_.ctx, counts_);
    row_parallel_backward(dx, dy, x, experts, saved, tp_, bench_.ctx, counts_);
    keep(left, {&y, &dx});

    const Tensor all_x = bench_.values(kX, all_, {0, width_}, width_, 1, bench_.dtype);
    const Tensor all_dy = bench_.values(kDy, all_, kAllHidden, kHidden, 0.1f, bench_.dtype);
    const Tensor x8 = through_fp8(all_x), dy8 = through_fp8(all_dy);
    const Exact want = exact(bench_, whole, kDown, x8, all_x, dy8, all_dy, counts_, 0.3f, false);
    const Exact most_of = exact(bench_, whole, kDown, x8, all_x, dy8, all_dy, counts_, 0.3f, true);
    most = std::max(most, worst(bench_.doubles(y), cut(want.y, kHidden, residual(), kAllHidden),
                                cut(most_of.y, kHidden, residual(), kAllHidden)));
    most = std::max(most, worst(bench_.doubles(dx), cut(want.dx, width_, all_, ffn_),
                                cut(most_of.dx, width_, all_, ffn_)));
    const Range rank{0, kAdapterRank};
    for (int e = 0; e < kExperts; ++e) {
      Expert& expert = part.expert(kDown, e);
      keep(left, {&expert.grad_a, &expert.grad_b});
      most = std::max(most,
                      worst(bench_.doubles(expert.grad_a), cut(want.grad_a[e], width_, rank, ffn_),
                            cut(most_of.grad_a[e], width_, rank, ffn_)));
      most = std::max(most, worst(replicated(expert.grad_b), want.grad_b[e], most_of.grad_b[e]));
      if (expert.matrix->usage().columnwise)
        return "a frozen expert keeps its columnwise copy";
    }
    return "";
  }

  TensorParallel tp_;
  Bench bench_;
  std::vector<int64_t> counts_;
  int64_t width_, total_;
  Range ffn_, all_, own_;
};

}  // namespace

void validate_grouped(World& world, const RunCheck& check) {
  const std::unique_ptr<Communicator> group = world.communicator("experts");
  Stream stream(world.device(), "tp");
  TensorParallel tp{*group, stream, true, true, false, {}};
  for (const Base base : {Base::kFrozenFp8, Base::kTrainedFp8, Base::kTrainedPlain}) {
    check(message("whole experts over ranks, ", to_string(base)),
          [&](std::string& detail) { return whole_experts(tp, base, detail); });
  }
  check("experts cut over ranks, frozen FP8 with adapters",
        [&](std::string& detail) { return CutExperts(*group, stream).run(detail); });
  check("counts that do not fit are refused before any collective", [&](std::string& detail) {
    const int64_t issued = group->issued();
    std::vector<int64_t> counts = row_counts(tp.size());
    counts.back() += 1;
    Bench bench(world.device(), DType::kF32);
    const Tensor x = bench.empty(kShare, kHidden), y = bench.empty(kShare * tp.size(), 128);
    Mlp mlp(bench, 0, kExperts, {0, 128}, 128, Base::kFrozenFp8);
    const std::vector<Linear> experts = mlp.linears(kGate, false, 0, 0);
    const View ys[] = {y};
    try {
      column_parallel_forward(ys, x, experts, nullptr, tp, bench.ctx, counts);
    } catch (const ShapeError& error) {
      detail = error.what();
    }
    try {
      ExpertPlaces(std::span(counts).subspan(1), kExperts, tp);
    } catch (const ShapeError& error) {
      if (!detail.empty() && group->issued() == issued)
        return std::string();
    }
    return std::string("they were taken");
  });
}

}  // namespace rowshard
