#include "finetune/validation_mixture.h"
#include "layers/parallel_linear.h"

namespace rowshard::mixture {
namespace {

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

std::string cut_experts(Communicator& group, Stream& stream, std::string& detail) {
  return CutExperts(group, stream).run(detail);
}

}  // namespace rowshard::mixture
