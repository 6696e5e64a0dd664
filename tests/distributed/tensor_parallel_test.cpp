// Tensor-parallel layers on any number of ranks against the same layer on one rank, and against
// f64. Every rank knows the whole problem and holds its part of it.
#include <cstring>

#include "core/matmul.h"
#include "distributed/dist_fixture.h"
#include "fp8/quantize.h"
#include "layers/elementwise.h"
#include "layers/parallel_linear.h"
#include "model/decoder_slice.h"
#include "unit/layers/layer_test.h"

namespace rowshard {
namespace {

using testing::DistBench;
using testing::Doubles;

constexpr int64_t kRank = 5;
constexpr int64_t kShare = 12;  // tokens a rank; the host's products depend on a row's place mod 12

/// Every 128x128 tile its own magnitude.
Doubles tiled(int64_t rows, int64_t cols, uint32_t seed, double scale) {
  Doubles values = testing::random_values(rows * cols, seed, scale);
  for (int64_t i = 0; i < rows * cols; ++i)
    values[i] *= std::exp2((i / cols / 128 * 3 + i % cols / 128) % 5 - 2);
  return values;
}

struct Product {
  Doubles values, magnitudes;
};

/// [m, n] = x [m, k] · w [n, k]ᵀ, and Σ |terms|, which bounds what rounding can do.
Product product(const Doubles& x, const Doubles& w, int64_t m, int64_t n, int64_t k) {
  Arena arena(kHost);
  Stream stream(kHost);
  Context ctx{arena, stream};
  const auto multiply = [&](const Doubles& a, const Doubles& b) {
    Doubles y(m * n);
    matmul(testing::view_of(y, {m, n}), testing::view_of(a, {m, k}), Transpose::kNo,
           testing::view_of(b, {n, k}), Transpose::kYes, 1, 0, ctx);
    return y;
  };
  const auto absolute = [](Doubles values) {
    for (double& value : values)
      value = std::abs(value);
    return values;
  };
  return {multiply(x, w), multiply(absolute(x), absolute(w))};
}

Doubles transposed(const Doubles& x, int64_t rows, int64_t cols) {
  Doubles y(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      y[j * rows + i] = x[i * cols + j];
  }
  return y;
}

template <typename V>
std::vector<V> block_of(const std::vector<V>& x, int64_t cols, Range rows, Range columns) {
  std::vector<V> part;
  for (int64_t r = rows.begin; r < rows.end; ++r)
    part.insert(part.end(), x.begin() + r * cols + columns.begin,
                x.begin() + r * cols + columns.end);
  return part;
}

void add_to(Product& sum, const Product& more, double factor = 1) {
  for (size_t i = 0; i < sum.values.size(); ++i) {
    sum.values[i] += factor * more.values[i];
    sum.magnitudes[i] += std::abs(factor) * more.magnitudes[i];
  }
}

struct Mode {
  bool fp8, sequence, overlap, wide, dropout;
};

std::string describe(const Mode& mode) {
  return message(mode.fp8 ? "fp8" : "plain", mode.sequence ? " sequence" : " all tokens",
                 mode.overlap ? " overlap" : " waits", mode.wide ? " wide sums" : "",
                 mode.dropout ? " dropout" : "");
}

/// What a layer left on this rank, bit for bit.
struct Left {
  std::vector<std::vector<uint8_t>> bytes;
  bool operator==(const Left&) const = default;
};

class TensorParallelTest : public testing::DistributedTest {
 protected:
  TensorParallelTest()
      : group_(world().communicator("tp")), stream_(device(), "tp"), tokens_(kShare * size()) {}

  TensorParallel parallel(const Mode& mode) {
    return TensorParallel{*group_, stream_, mode.sequence, mode.overlap, mode.wide, {}};
  }
  Range own_tokens(const Mode& mode) const {
    return mode.sequence ? Range{kShare * rank(), kShare * (rank() + 1)} : Range{0, tokens_};
  }

  std::unique_ptr<Communicator> group_;
  Stream stream_;
  int64_t tokens_;
  DistBench bench;
};

/// One frozen weight with its adapter: the whole in f64 as T and FP8 hold it, and a rank's part.
template <typename T>
struct Layer {
  int64_t n, k;
  Doubles w, w8, bias, a, b;  // [N, K], dequantised, [N], [r, K], [N, r]
  DistBench& bench;

  Layer(int64_t n_, int64_t k_, uint32_t seed, DistBench& bench_) : n(n_), k(k_), bench(bench_) {
    w = testing::representable<bf16>(tiled(n, k, seed, 0.1));
    bias = testing::representable<T>(testing::random_values(n, seed + 1));
    a = testing::representable<T>(testing::random_values(kRank * k, seed + 2, 0.1));
    b = testing::representable<T>(testing::random_values(n * kRank, seed + 3, 0.1));
    const auto [codes, scales] = quantized(w, n, k);
    w8.resize(n * k);
    const Tensor wide = bench.arena.tensor(Category::kWorkspace, "wide", DType::kF32, {n, k});
    dequantize(wide, ConstFp8View{codes, scales, Grouping::k128x128}, bench.stream);
    w8 = testing::widened(bench.download<float>(wide));
  }

  std::pair<Tensor, Tensor> quantized(const Doubles& values, int64_t rows, int64_t cols) const {
    const Tensor plain = bench.upload(testing::narrowed<bf16>(values), {rows, cols});
    Tensor codes = bench.arena.tensor(Category::kWorkspace, "codes", DType::kE4M3, {rows, cols});
    Tensor scales = bench.arena.tensor(Category::kWorkspace, "scales", DType::kF32,
                                       gemm_scale_shape(Grouping::k128x128, rows, cols));
    const Fp8View view{codes, scales, Grouping::k128x128};
    quantize(&view, nullptr, plain, {}, bench.stream);
    return {std::move(codes), std::move(scales)};
  }

  /// This rank's part on the device.
  struct Part {
    Range rows, cols;
    std::unique_ptr<Fp8Matrix> matrix;
    Tensor plain, bias, a, b, grad_a, grad_b;
    LinearWeight weight;
    LoraFactors lora;
  };
  Part part(Range rows, Range cols, bool fp8, bool whole_bias) const {
    Part p{rows, cols, nullptr, {}, {}, {}, {}, {}, {}, {}, {}};
    const Doubles values = block_of(w, k, rows, cols);
    const int64_t pn = rows.size(), pk = cols.size();
    p.weight.name = "w";
    p.weight.n = pn;
    p.weight.k = pk;
    if (fp8) {
      auto [codes, scales] = quantized(values, pn, pk);
      p.matrix = std::make_unique<Fp8Matrix>("w", pn, pk, Grouping::k128x128, bench.arena.device());
      p.matrix->own_rowwise(std::move(codes), std::move(scales));
      p.weight.fp8 = p.matrix.get();
    } else {
      p.plain = bench.upload(testing::narrowed<bf16>(values), {pn, pk});
      p.weight.plain = p.plain;
    }
    const Range bias_rows = whole_bias ? Range{0, n} : rows;
    p.bias = bench.upload(testing::narrowed<T>(block_of(bias, 1, bias_rows, {0, 1})),
                          {bias_rows.size()});
    p.weight.bias = p.bias;
    p.a = bench.upload(testing::narrowed<T>(block_of(a, k, {0, kRank}, cols)), {kRank, pk});
    p.b = bench.upload(testing::narrowed<T>(block_of(b, kRank, rows, {0, kRank})), {pn, kRank});
    p.grad_a = bench.upload(std::vector<float>(kRank * pk, 0.0f), {kRank, pk});
    p.grad_b = bench.upload(std::vector<float>(pn * kRank, 0.0f), {pn, kRank});
    p.lora = {p.a, p.b, p.grad_a, p.grad_b, 0.5f};
    return p;
  }
};

/// What rounding may do: to T once for each of a few intermediate results (and for each rank's part
/// of a sum), in f32 once a term, and what FP8 products on tensor cores drop (docs/testing.md).
template <typename T>
double bound(int64_t terms, int ranks, bool cuda) {
  return testing::kRounding<T> * (6 + ranks) + 0x1p-24 * static_cast<double>(terms) +
         (cuda ? 1e-3 : 0);
}

void expect_within(const Doubles& got, const Product& want, double relative, const char* what) {
  ASSERT_EQ(got.size(), want.values.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    const double most = relative * want.magnitudes[i] + 1e-30;
    ASSERT_LE(std::abs(got[i] - want.values[i]), most)
        << what << " element " << i << ": " << got[i] << ", want " << want.values[i];
  }
}

template <typename T>
class LayerTest : public TensorParallelTest {
 protected:
  bool runs(const Mode&) const { return !(device().is_cuda() && std::is_same_v<T, float>); }

  Tensor activations(const Doubles& whole, int64_t cols, Range rows, Range columns) {
    return bench.upload(testing::narrowed<T>(block_of(whole, cols, rows, columns)),
                        {rows.size(), columns.size()});
  }
  Tensor empty(int64_t rows, int64_t cols) {
    return bench.arena.tensor(Category::kActivations, "out", DTypeOf<T>::value, {rows, cols});
  }
  /// The whole tensor as 1x128 FP8 holds it.
  Doubles through_fp8(const Doubles& whole, int64_t rows, int64_t cols) {
    const Tensor x = activations(whole, cols, {0, rows}, {0, cols});
    const Tensor codes = bench.arena.tensor(Category::kWorkspace, "c", DType::kE4M3, {rows, cols});
    const Tensor scales = bench.arena.tensor(Category::kWorkspace, "s", DType::kF32,
                                             gemm_scale_shape(Grouping::k1x128, rows, cols));
    const Fp8View view{codes, scales, Grouping::k1x128};
    quantize(&view, nullptr, x, {}, bench.stream);
    const Tensor wide = bench.arena.tensor(Category::kWorkspace, "w", DType::kF32, {rows, cols});
    dequantize(wide, view, bench.stream);
    return testing::widened(bench.download<float>(wide));
  }
  static Dropout dropout_of(const Mode& mode, uint64_t stream) {
    Dropout dropout;
    dropout.rate = mode.dropout ? 0.3f : 0.0f;
    dropout.random = {11, stream};
    return dropout;
  }
  /// What the mask leaves of the whole x, by the rule in layers/lora.h.
  static Doubles masked(const Doubles& x, const Dropout& dropout) {
    Doubles result = x;
    for (size_t i = 0; i < x.size() && dropout.rate > 0; ++i) {
      result[i] = dropout.random.uniform(i) < dropout.rate
                      ? 0
                      : static_cast<double>(
                            widen(narrow<T>(static_cast<float>(x[i]) * (1 / (1 - dropout.rate)))));
    }
    return result;
  }
  /// A gradient of a factor that every rank holds whole.
  Doubles replicated_gradient(const Tensor& gradient, const Mode& mode) {
    if (mode.sequence)
      group_->all_reduce(gradient, Reduction::kSum, bench.stream);
    return testing::widened(bench.download<float>(gradient));
  }

  /// Gradients of an adapter's factors on one rank, as bits. dx is not asked for.
  struct FactorGradients {
    std::vector<uint8_t> a, b;
  };
  FactorGradients alone(const ConstView& dy, const ConstView& x, const LoraFactors& factors,
                        const Dropout& dropout) {
    const int64_t k = x.dim(1), n = dy.dim(1);
    const Tensor a = bench.upload(std::vector<float>(kRank * k, 0.0f), {kRank, k});
    const Tensor b = bench.upload(std::vector<float>(n * kRank, 0.0f), {n, kRank});
    LoraFactors own = factors;
    own.grad_a = a;
    own.grad_b = b;
    LoraSaved saved;
    const Tensor y = empty(x.dim(0), n);
    fill_bytes(y, 0, bench.stream);
    lora_forward(y, x, own, dropout, &saved, bench.ctx);
    lora_backward({}, dy, x, own, saved, bench.ctx);
    return {bench.template download<uint8_t>(a), bench.template download<uint8_t>(b)};
  }

  Left column(const Mode& mode);
  Left row(const Mode& mode);
};
using ActivationTypes = ::testing::Types<float, bf16>;
TYPED_TEST_SUITE(LayerTest, ActivationTypes);

template <typename T>
Left LayerTest<T>::column(const Mode& mode) {
  const int64_t k = 256, blocks[] = {size() + 1, size(), size()};
  const double relative = bound<T>(2000, size(), device().is_cuda());
  const Doubles x = testing::representable<T>(tiled(tokens_, k, 1, 1));
  const Doubles x8 = mode.fp8 ? through_fp8(x, tokens_, k) : x;
  std::vector<Layer<T>> layers;
  std::vector<typename Layer<T>::Part> parts;
  std::vector<Linear> linears;
  std::vector<Tensor> ys, dys;
  std::vector<Doubles> dy_values;
  for (uint32_t i = 0; i < 3; ++i) {
    layers.emplace_back(128 * blocks[i], k, 10 * i + 2, bench);
    const Range rows = near_equal_part(128 * blocks[i], 128, size(), rank());
    parts.push_back(layers[i].part(rows, {0, k}, mode.fp8, false));
    ys.push_back(empty(tokens_, rows.size()));
    dy_values.push_back(testing::representable<T>(tiled(tokens_, layers[i].n, 50 + i, 0.1)));
    dys.push_back(activations(dy_values[i], layers[i].n, {0, tokens_}, rows));
  }
  for (int i = 0; i < 3; ++i) {  // the second has no adapter
    linears.push_back({.weight = &parts[i].weight,
                       .lora = i == 1 ? nullptr : &parts[i].lora,
                       .dropout = dropout_of(mode, i)});
  }
  TensorParallel tp = parallel(mode);
  const Range own = own_tokens(mode);
  const Tensor xt = activations(x, k, own, {0, k});
  ParallelSaved saved;
  const std::vector<View> outputs(ys.begin(), ys.end());
  column_parallel_forward(outputs, xt, linears, &saved, tp, bench.ctx);

  Left left;
  Product dx_want{Doubles(tokens_ * k, 0), Doubles(tokens_ * k, 0)};
  for (int i = 0; i < 3; ++i) {
    const Layer<T>& layer = layers[i];
    const Doubles& w = mode.fp8 ? layer.w8 : layer.w;
    const Doubles xm = masked(x, linears[i].dropout);
    Product y = product(x8, w, tokens_, layer.n, k);
    for (int64_t e = 0; e < tokens_ * layer.n; ++e) {
      y.values[e] += layer.bias[e % layer.n];
      y.magnitudes[e] += std::abs(layer.bias[e % layer.n]);
    }
    const Product xa = product(xm, layer.a, tokens_, kRank, k);
    if (linears[i].lora)
      add_to(y, product(xa.values, layer.b, tokens_, layer.n, kRank), 0.5);
    const auto cut = [&](const Doubles& v) {
      return block_of(v, layer.n, {0, tokens_}, parts[i].rows);
    };
    expect_within(testing::widened(bench.download<T>(ys[i])), {cut(y.values), cut(y.magnitudes)},
                  8 * relative, "y");

    // Without an adapter nothing crosses the ranks: the bits are those of one rank that multiplies
    // all tokens by these rows of W. (By all of W, OpenBLAS sums some columns in another order.)
    if (mode.fp8 && !linears[i].lora) {
      const auto alone = layer.part(parts[i].rows, {0, k}, true, false);
      const Tensor all_x = activations(x, k, {0, tokens_}, {0, k});
      const Tensor all_y = empty(tokens_, parts[i].rows.size());
      linear_forward(all_y, all_x, Linear{.weight = &alone.weight}, nullptr, bench.ctx);
      EXPECT_EQ(bench.template download<uint8_t>(all_y), bench.template download<uint8_t>(ys[i]))
          << "y of the frozen layer";
    }
    const Doubles dy8 = mode.fp8 ? through_fp8(dy_values[i], tokens_, layer.n) : dy_values[i];
    add_to(dx_want, product(dy8, transposed(w, layer.n, k), tokens_, k, layer.n));
  }

  const Tensor dx = empty(own.size(), k);
  const std::vector<ConstView> gradients(dys.begin(), dys.end());
  column_parallel_backward(dx, gradients, xt, linears, saved, tp, bench.ctx);
  for (int i = 0; i < 3; ++i) {
    if (parts[i].matrix) {
      EXPECT_FALSE(parts[i].matrix->usage().columnwise) << "released";
    }
    left.bytes.push_back(bench.download<uint8_t>(ys[i]));
    left.bytes.push_back(bench.download<uint8_t>(parts[i].grad_b));
    if (!linears[i].lora)
      continue;
    const Layer<T>& layer = layers[i];
    const Doubles xm = masked(x, linears[i].dropout);
    const Product dxa =
        product(dy_values[i], transposed(layer.b, layer.n, kRank), tokens_, kRank, layer.n);
    Product branch{Doubles(tokens_ * k, 0), Doubles(tokens_ * k, 0)};
    add_to(branch, product(dxa.values, transposed(layer.a, kRank, k), tokens_, k, kRank), 0.5);
    branch.values = masked(branch.values, linears[i].dropout);
    for (double& m : branch.magnitudes)
      m *= 4;  // products of sums: their own roundings count too
    add_to(dx_want, branch);
    Product grad_a = product(transposed(dxa.values, tokens_, kRank), transposed(xm, tokens_, k),
                             kRank, k, tokens_);
    grad_a.magnitudes = product(transposed(dxa.magnitudes, tokens_, kRank),
                                transposed(xm, tokens_, k), kRank, k, tokens_)
                            .magnitudes;
    for (double& v : grad_a.values)
      v *= 0.5;
    expect_within(replicated_gradient(parts[i].grad_a, mode), grad_a, relative, "dA");
    const Product xa = product(xm, layer.a, tokens_, kRank, k);
    Product grad_b = product(transposed(dy_values[i], tokens_, layer.n),
                             transposed(xa.values, tokens_, kRank), layer.n, kRank, tokens_);
    grad_b.magnitudes = product(transposed(dy_values[i], tokens_, layer.n),
                                transposed(xa.magnitudes, tokens_, kRank), layer.n, kRank, tokens_)
                            .magnitudes;
    for (double& v : grad_b.values)
      v *= 0.5;
    const auto cut = [&](const Doubles& v) {
      return block_of(v, kRank, parts[i].rows, {0, kRank});
    };
    expect_within(testing::widened(bench.download<float>(parts[i].grad_b)),
                  {cut(grad_b.values), cut(grad_b.magnitudes)}, relative, "dB");
    if (device().is_host()) {  // no sum of it crosses ranks; cuBLASLt chooses by the rows of A · x
      const Tensor all_x = activations(x, k, {0, tokens_}, {0, k});
      EXPECT_EQ(bench.download<uint8_t>(parts[i].grad_b),
                alone(dys[i], all_x, *linears[i].lora, linears[i].dropout).b)
          << "dB is one rank's";
    }
    left.bytes.push_back(bench.download<uint8_t>(parts[i].grad_a));
  }
  const auto cut = [&](const Doubles& v) { return block_of(v, k, own, {0, k}); };
  expect_within(testing::widened(bench.download<T>(dx)),
                {cut(dx_want.values), cut(dx_want.magnitudes)}, 4 * relative, "dx");
  left.bytes.push_back(bench.download<uint8_t>(dx));
  return left;
}

template <typename T>
Left LayerTest<T>::row(const Mode& mode) {
  const int64_t k = 128 * (size() + 1), n = 320;
  const double relative = bound<T>(2000, size(), device().is_cuda());
  const Layer<T> layer(n, k, 3, bench);
  const Doubles& w = mode.fp8 ? layer.w8 : layer.w;
  const Range cols = near_equal_part(k, 128, size(), rank());
  const auto part = layer.part({0, n}, cols, mode.fp8, true);
  const Doubles x = testing::representable<T>(tiled(tokens_, k, 1, 1));
  const Doubles dy = testing::representable<T>(tiled(tokens_, n, 2, 0.1));
  Linear linear{.weight = &part.weight, .lora = &part.lora, .dropout = dropout_of(mode, 7)};
  const Doubles xm = masked(x, linear.dropout);
  linear.dropout.first_column = cols.begin;
  linear.dropout.columns = k;
  TensorParallel tp = parallel(mode);
  const Range own = own_tokens(mode);
  const Tensor xt = activations(x, k, {0, tokens_}, cols);
  const Tensor dyt = activations(dy, n, own, {0, n});
  const Tensor y = empty(own.size(), n), dx = empty(tokens_, cols.size());
  ParallelSaved saved;
  row_parallel_forward(y, xt, {&linear, 1}, &saved, tp, bench.ctx);
  row_parallel_backward(dx, dyt, xt, {&linear, 1}, saved, tp, bench.ctx);
  {  // What no sum over ranks goes into: dA, and dx of the frozen weight.
    const Tensor all_dy = activations(dy, n, {0, tokens_}, {0, n});
    if (device().is_host()) {
      EXPECT_EQ(bench.download<uint8_t>(part.grad_a),
                alone(all_dy, xt, part.lora, linear.dropout).a)
          << "dA is one rank's";
    }
    const Linear frozen{.weight = &part.weight};
    const Tensor dx_split = empty(tokens_, cols.size()), dx_alone = empty(tokens_, cols.size());
    row_parallel_backward(dx_split, dyt, xt, {&frozen, 1}, {}, tp, bench.ctx);
    LinearSaved nothing;
    const Tensor y_alone = empty(tokens_, n);
    linear_forward(y_alone, xt, frozen, &nothing, bench.ctx);
    linear_backward(dx_alone, all_dy, nothing, frozen, false, bench.ctx);
    if (device().is_host() || mode.fp8) {
      EXPECT_EQ(bench.download<uint8_t>(dx_split), bench.download<uint8_t>(dx_alone))
          << "dx is one rank's";
    }
  }
  if (part.matrix) {
    EXPECT_FALSE(part.matrix->usage().columnwise) << "released";
  }

  Product y_want = product(mode.fp8 ? through_fp8(x, tokens_, k) : x, w, tokens_, n, k);
  for (int64_t e = 0; e < tokens_ * n; ++e) {
    y_want.values[e] += layer.bias[e % n];
    y_want.magnitudes[e] += std::abs(layer.bias[e % n]);
  }
  const Product xa = product(xm, layer.a, tokens_, kRank, k);
  Product branch = product(xa.values, layer.b, tokens_, n, kRank);
  branch.magnitudes = [&] {
    Doubles b = layer.b;
    for (double& v : b)
      v = std::abs(v);
    return product(xa.magnitudes, b, tokens_, n, kRank).values;
  }();
  add_to(y_want, branch, 0.5);
  const auto cut = [&](const Product& p) {
    return Product{block_of(p.values, n, own, {0, n}), block_of(p.magnitudes, n, own, {0, n})};
  };
  expect_within(testing::widened(bench.download<T>(y)), cut(y_want), relative, "y");

  const auto columns = [&](const Product& p, int64_t rows) {
    return Product{block_of(p.values, k, {0, rows}, cols),
                   block_of(p.magnitudes, k, {0, rows}, cols)};
  };
  const Doubles dy8 = mode.fp8 ? through_fp8(dy, tokens_, n) : dy;
  Product dx_want = product(dy8, transposed(w, n, k), tokens_, k, n);
  const Product dxa = product(dy, transposed(layer.b, n, kRank), tokens_, kRank, n);
  {
    Product dx_branch = product(dxa.values, transposed(layer.a, kRank, k), tokens_, k, kRank);
    Dropout whole = linear.dropout;
    whole.first_column = whole.columns = 0;
    for (double& v : dx_branch.values)
      v *= 0.5;
    dx_branch.values = masked(dx_branch.values, whole);
    for (double& m : dx_branch.magnitudes)
      m *= 4;
    add_to(dx_want, dx_branch);
  }
  expect_within(testing::widened(bench.download<T>(dx)), columns(dx_want, tokens_), 4 * relative,
                "dx");
  Product grad_a = product(transposed(dxa.values, tokens_, kRank), transposed(xm, tokens_, k),
                           kRank, k, tokens_);
  grad_a.magnitudes = product(transposed(dxa.magnitudes, tokens_, kRank),
                              transposed(xm, tokens_, k), kRank, k, tokens_)
                          .magnitudes;
  for (double& v : grad_a.values)
    v *= 0.5;
  expect_within(testing::widened(bench.download<float>(part.grad_a)), columns(grad_a, kRank),
                relative, "dA");
  Product grad_b =
      product(transposed(dy, tokens_, n), transposed(xa.values, tokens_, kRank), n, kRank, tokens_);
  grad_b.magnitudes = product(transposed(dy, tokens_, n), transposed(xa.magnitudes, tokens_, kRank),
                              n, kRank, tokens_)
                          .magnitudes;
  for (double& v : grad_b.values)
    v *= 0.5;
  Left left;
  for (const Tensor* tensor : {&y, &dx, &part.grad_a, &part.grad_b})
    left.bytes.push_back(bench.download<uint8_t>(*tensor));
  expect_within(replicated_gradient(part.grad_b, mode), grad_b, relative, "dB");
  return left;
}

constexpr Mode kModes[] = {{true, true, true, false, false},  {true, true, true, false, true},
                           {true, false, true, false, true},  {true, true, true, true, false},
                           {true, false, true, true, false},  {false, true, true, false, true},
                           {false, false, true, false, false}};

TYPED_TEST(LayerTest, ColumnParallelIsTheWholeLayer) {
  for (Mode mode : kModes) {
    if (!this->runs(mode))
      GTEST_SKIP() << "f32 activations are the host's";
    SCOPED_TRACE(describe(mode));
    const Left overlapped = this->column(mode);
    mode.overlap = false;
    EXPECT_TRUE(overlapped == this->column(mode)) << "overlap changes no bit";
    if (this->HasFailure())
      return;
  }
}

TYPED_TEST(LayerTest, RowParallelIsTheWholeLayer) {
  for (Mode mode : kModes) {
    if (!this->runs(mode))
      GTEST_SKIP() << "f32 activations are the host's";
    SCOPED_TRACE(describe(mode));
    const Left overlapped = this->row(mode);
    mode.overlap = false;
    EXPECT_TRUE(overlapped == this->row(mode)) << "overlap changes no bit";
    if (this->HasFailure())
      return;
  }
}

// Codes and scales that travelled are those of quantising the whole.
TEST_F(TensorParallelTest, QuantisedGatherIsQuantisingTheWhole) {
  const int64_t share = 10, tokens = share * size();  // scales padded to 12
  for (const int64_t cols : {128, 200, 640}) {
    const auto whole = testing::narrowed<float>(tiled(tokens, cols, 9, 1));
    const auto quantised = [&](const std::vector<float>& values, int64_t rows) {
      const Tensor x = bench.upload(values, {rows, cols});
      Tensor codes = bench.arena.tensor(Category::kWorkspace, "c", DType::kE4M3, {rows, cols});
      Tensor scales = bench.arena.tensor(Category::kWorkspace, "s", DType::kF32,
                                         gemm_scale_shape(Grouping::k1x128, rows, cols));
      const Fp8View view{codes, scales, Grouping::k1x128};
      quantize(&view, nullptr, x, {}, bench.stream);
      return std::pair(std::move(codes), std::move(scales));
    };
    TensorParallel tp = parallel({true, true, true, false, false});
    RankParts parts(size());
    std::vector<std::pair<Tensor, Tensor>> panels;
    for (int r = 0; r < size(); ++r) {
      const Range rows{share * r, share * (r + 1)};
      if (r == rank()) {
        panels.push_back(quantised(block_of(whole, cols, rows, {0, cols}), share));
      } else {
        panels.emplace_back(
            bench.arena.tensor(Category::kCommunication, "c", DType::kE4M3, {share, cols}),
            bench.arena.tensor(Category::kCommunication, "s", DType::kF32,
                               gemm_scale_shape(Grouping::k1x128, share, cols)));
      }
      parts[r] = {panels[r].first, panels[r].second};
    }
    group_->reset_wire_bytes();
    TokenGather gather(tp, parts, bench.ctx);
    for (int step = 0; step < size(); ++step)
      gather.wait(step);
    const auto [codes, scales] = quantised(whole, tokens);
    const auto all_codes = bench.download<uint8_t>(codes);
    const auto all_scales = bench.download<float>(scales);
    for (int r = 0; r < size(); ++r) {
      const auto got = bench.download<uint8_t>(panels[r].first);
      EXPECT_EQ(0, std::memcmp(got.data(), &all_codes[share * r * cols], got.size()));
      const auto panel = bench.download<float>(panels[r].second);
      for (int64_t group = 0; group < ceil_div(cols, 128); ++group) {
        for (int64_t t = 0; t < share; ++t)
          EXPECT_EQ(panel[group * 12 + t], all_scales[group * scales.shape()[1] + share * r + t]);
      }
    }
    // One byte an element, and four for each group of 128 with the tokens up to a multiple of 4.
    EXPECT_EQ(group_->wire_bytes(), (size() - 1) * (share * cols + 12 * 4 * ceil_div(cols, 128)));
  }
}

TEST_F(TensorParallelTest, TokensThatDoNotDivideAreRefused) {
  TensorParallel tp = parallel({true, true, true, false, false});
  if (size() > 1) {
    EXPECT_THROW(tp.share(tokens_ + 1), ShapeError);
  }
  EXPECT_EQ(tp.share(tokens_), kShare);
}

}  // namespace
}  // namespace rowshard
