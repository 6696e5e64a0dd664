#include <algorithm>
#include <cmath>
#include <vector>

#include "layers/attention_scratch.h"
#include "layers/dispatch.h"
#include "layers/host_math.h"
#include "layers/host_product.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx);
void attention_backward(const View& dq, const View& dk, const View& dv, const ConstView& d_o,
                        const ConstView& q, const ConstView& k, const ConstView& v,
                        const ConstView& o, const ConstView& lse, const Segments& segments,
                        double scale, Context& ctx);
}  // namespace cuda
#endif

namespace host {
namespace {

// Queries handled at once: few enough that little above the diagonal is computed for nothing.
constexpr int64_t kBlock = 48;
// Rows of keys in scratch are padded to whole vectors of either type.
constexpr int64_t kPadding = 16;

struct Dims {
  int64_t tokens, heads, kv_heads, head_dim;

  int64_t group() const { return heads / kv_heads; }
  int64_t row() const { return heads * head_dim; }  // between two tokens of one head
  int64_t kv_row() const { return kv_heads * head_dim; }
};

/// Scratch of one thread, large enough for the longest segment.
template <typename T>
struct Scratch {
  int64_t padded = 0;           // keys of the current segment, padded
  std::vector<T> k_transposed;  // [D, padded]
  std::vector<T> v_transposed;  // [D, padded]
  std::vector<T> p, dp;         // [kBlock, padded]

  Scratch(int64_t longest, int64_t head_dim, bool backward) {
    const int64_t keys = round_up(longest, kPadding);
    k_transposed.resize(head_dim * keys);
    p.resize(kBlock * keys);
    if (backward) {
      v_transposed.resize(head_dim * keys);
      dp.resize(kBlock * keys);
    }
  }
};

/// to [D, padded] = the transpose of from [length, D], zeros in the padding.
template <typename T>
void transpose(T* to, int64_t padded, const T* from, int64_t length, const Dims& d) {
  for (int64_t c = 0; c < d.head_dim; ++c) {
    for (int64_t j = 0; j < length; ++j)
      to[c * padded + j] = from[j * d.kv_row() + c];
    std::fill(to + c * padded + length, to + (c + 1) * padded, T{0});
  }
}

/// out [rows, padded] = x [rows, D] · y_transposed for the first `keys` columns and their padding.
template <typename T>
void block_scores(T* out, const T* x, const T* y_transposed, int64_t rows, int64_t keys,
                  int64_t padded, const Dims& d) {
  const int64_t cols = std::min(round_up(keys, kPadding), padded);
  for (int64_t i = 0; i < rows; ++i)
    std::fill_n(out + i * padded, cols, T{0});
  add_product(out, padded, Strided<T>{x, d.row(), 1}, y_transposed, padded, rows, cols, d.head_dim);
}

/// Replaces a row's products by exp(scale · product − shift), and by 0 after its last visible key.
template <typename T>
T exponentiate(T* row, T scale, T shift, int64_t visible, int64_t keys) {
  T total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < visible; ++j) {
    row[j] = fast_exp(row[j] * scale - shift);
    total += row[j];
  }
  std::fill(row + visible, row + keys, T{0});
  return total;
}

template <typename T>
void forward_head(T* o, T* lse, const T* q, const T* v, int64_t length, T scale, const Dims& d,
                  Scratch<T>& scratch) {
  T* p = scratch.p.data();
  const int64_t padded = scratch.padded;
  for (int64_t first = 0; first < length; first += kBlock) {
    const int64_t rows = std::min(kBlock, length - first);
    const int64_t keys = first + rows;
    block_scores(p, q + first * d.row(), scratch.k_transposed.data(), rows, keys, padded, d);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = p + i * padded;
      const int64_t visible = first + i + 1;
      T maximum = row[0] * scale;
#pragma omp simd reduction(max : maximum)
      for (int64_t j = 0; j < visible; ++j)
        maximum = std::max(maximum, row[j] * scale);
      const T total = exponentiate(row, scale, maximum, visible, keys);
      lse[(first + i) * d.heads] = maximum + std::log(total);
      const T inverse = 1 / total;
#pragma omp simd
      for (int64_t j = 0; j < visible; ++j)
        row[j] *= inverse;
      std::fill_n(o + (first + i) * d.row(), d.head_dim, T{0});
    }
    add_product(o + first * d.row(), d.row(), Strided<T>{p, padded, 1}, v, d.kv_row(), rows,
                d.head_dim, keys);
  }
}

/// Adds to dk and dv, writes dq.
template <typename T>
void backward_head(T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* o,
                   const T* lse, int64_t length, T scale, const Dims& d, Scratch<T>& scratch) {
  T* p = scratch.p.data();
  T* dp = scratch.dp.data();
  const int64_t padded = scratch.padded;
  for (int64_t first = 0; first < length; first += kBlock) {
    const int64_t rows = std::min(kBlock, length - first);
    const int64_t keys = first + rows;
    const T* q_block = q + first * d.row();
    const T* grad = d_o + first * d.row();
    block_scores(p, q_block, scratch.k_transposed.data(), rows, keys, padded, d);
    block_scores(dp, grad, scratch.v_transposed.data(), rows, keys, padded, d);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = p + i * padded;
      T* drow = dp + i * padded;
      exponentiate(row, scale, lse[(first + i) * d.heads], first + i + 1, keys);
      // Σ_j p_j · dp_j = do · o, without another pass over the keys.
      T delta = 0;
#pragma omp simd reduction(+ : delta)
      for (int64_t c = 0; c < d.head_dim; ++c) {
        delta += grad[i * d.row() + c] * o[(first + i) * d.row() + c];
      }
#pragma omp simd
      for (int64_t j = 0; j < keys; ++j)
        drow[j] = row[j] * (drow[j] - delta) * scale;
      std::fill_n(dq + (first + i) * d.row(), d.head_dim, T{0});
    }
    const Strided<T> p_block{p, padded, 1}, dp_block{dp, padded, 1};
    add_product(dv, d.kv_row(), p_block.transposed(), grad, d.row(), keys, d.head_dim, rows);
    add_product(dk, d.kv_row(), dp_block.transposed(), q_block, d.row(), keys, d.head_dim, rows);
    add_product(dq + first * d.row(), d.row(), dp_block, k, d.kv_row(), rows, d.head_dim, keys);
  }
}

// Segments and key heads are independent. The query heads of one key head stay together: they share
// its transposed keys, and add to the same dk and dv in a fixed order.
template <typename T>
void forward(T* o, T* lse, const T* q, const T* k, const T* v, const Segments& segments, T scale,
             const Dims& d) {
  const auto& bounds = segments.bounds();
#pragma omp parallel if (d.tokens * d.row() > kParallelElements)
  {
    Scratch<T> scratch(segments.longest(), d.head_dim, /*backward=*/false);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < segments.count(); ++s) {
      for (int64_t kv_head = 0; kv_head < d.kv_heads; ++kv_head) {
        const int64_t length = bounds[s + 1] - bounds[s];
        const int64_t kv_at = bounds[s] * d.kv_row() + kv_head * d.head_dim;
        scratch.padded = round_up(length, kPadding);
        transpose(scratch.k_transposed.data(), scratch.padded, k + kv_at, length, d);
        for (int64_t head = kv_head * d.group(); head < (kv_head + 1) * d.group(); ++head) {
          const int64_t at = bounds[s] * d.row() + head * d.head_dim;
          forward_head(o + at, lse + bounds[s] * d.heads + head, q + at, v + kv_at, length, scale,
                       d, scratch);
        }
      }
    }
  }
}

template <typename T>
void backward(T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v, const T* o,
              const T* lse, const Segments& segments, T scale, const Dims& d) {
  const auto& bounds = segments.bounds();
  std::fill_n(dk, d.tokens * d.kv_row(), T{0});
  std::fill_n(dv, d.tokens * d.kv_row(), T{0});
#pragma omp parallel if (d.tokens * d.row() > kParallelElements)
  {
    Scratch<T> scratch(segments.longest(), d.head_dim, /*backward=*/true);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < segments.count(); ++s) {
      for (int64_t kv_head = 0; kv_head < d.kv_heads; ++kv_head) {
        const int64_t length = bounds[s + 1] - bounds[s];
        const int64_t kv_at = bounds[s] * d.kv_row() + kv_head * d.head_dim;
        scratch.padded = round_up(length, kPadding);
        transpose(scratch.k_transposed.data(), scratch.padded, k + kv_at, length, d);
        transpose(scratch.v_transposed.data(), scratch.padded, v + kv_at, length, d);
        for (int64_t head = kv_head * d.group(); head < (kv_head + 1) * d.group(); ++head) {
          const int64_t at = bounds[s] * d.row() + head * d.head_dim;
          backward_head(dq + at, dk + kv_at, dv + kv_at, d_o + at, q + at, k + kv_at, o + at,
                        lse + bounds[s] * d.heads + head, length, scale, d, scratch);
        }
      }
    }
  }
}

Dims dims_of(const ConstView& q, const ConstView& k) {
  return {q.dim(0), q.dim(1), k.dim(1), q.dim(2)};
}

}  // namespace

void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx) {
  const Dims d = dims_of(q, k);
  if (q.dtype == DType::kBF16) {
    const AttentionScratch wide(q, k, /*backward=*/false, ctx);
    convert(wide.q, q, ctx.stream);
    convert(wide.k, k, ctx.stream);
    convert(wide.v, v, ctx.stream);
    host::attention(wide.o, lse, wide.q, wide.k, wide.v, segments, scale, ctx);
    convert(o, wide.o, ctx.stream);
    return;
  }
  const auto run = [&](auto type) {
    using T = decltype(type);
    forward<T>(o.as<T>(), lse.as<T>(), q.as<T>(), k.as<T>(), v.as<T>(), segments,
               static_cast<T>(scale), d);
  };
  q.dtype == DType::kF64 ? run(double{}) : run(float{});
}

void attention_backward(const View& dq, const View& dk, const View& dv, const ConstView& d_o,
                        const ConstView& q, const ConstView& k, const ConstView& v,
                        const ConstView& o, const ConstView& lse, const Segments& segments,
                        double scale, Context& ctx) {
  const Dims d = dims_of(q, k);
  if (q.dtype == DType::kBF16) {
    const AttentionScratch wide(q, k, /*backward=*/true, ctx);
    for (const auto& [to, from] : {std::pair<View, ConstView>{wide.d_o, d_o},
                                   {wide.q, q},
                                   {wide.k, k},
                                   {wide.v, v},
                                   {wide.o, o}}) {
      convert(to, from, ctx.stream);
    }
    host::attention_backward(wide.dq, wide.dk, wide.dv, wide.d_o, wide.q, wide.k, wide.v, wide.o,
                             lse, segments, scale, ctx);
    convert(dq, wide.dq, ctx.stream);
    convert(dk, wide.dk, ctx.stream);
    convert(dv, wide.dv, ctx.stream);
    return;
  }
  const auto run = [&](auto type) {
    using T = decltype(type);
    backward<T>(dq.as<T>(), dk.as<T>(), dv.as<T>(), d_o.as<T>(), q.as<T>(), k.as<T>(), v.as<T>(),
                o.as<T>(), lse.as<T>(), segments, static_cast<T>(scale), d);
  };
  q.dtype == DType::kF64 ? run(double{}) : run(float{});
}

}  // namespace host

namespace {

bool fits(const ConstView& o, const ConstView& lse, const ConstView& q, const ConstView& k,
          const ConstView& v, const Segments& segments) {
  return q.shape.rank() == 3 && k.shape.rank() == 3 && same_operands(q, {o}) &&
         same_operands(k, {v}) && k.dtype == q.dtype && k.device == q.device &&
         k.dim(0) == q.dim(0) && k.dim(2) == q.dim(2) && k.dim(1) > 0 && q.dim(1) % k.dim(1) == 0 &&
         lse.shape == Shape{q.dim(0), q.dim(1)} && lse.dtype == accumulator_dtype(q.dtype) &&
         lse.device == q.device && segments.tokens() == q.dim(0) &&
         segments.starts().device == q.device;
}

void plan_scratch(const ConstView& q, const ConstView& k, bool backward, Context& ctx) {
  if (ctx.device().index == 0)
    host::AttentionScratch(q, k, backward, ctx);
  else
    cuda::AttentionScratch(q, k, backward, ctx);
}

constexpr const char* kRule =
    "q and o [T, Hq, D], k and v [T, Hkv, D] with Hkv a divisor of Hq, lse [T, Hq], segments of T "
    "tokens";

}  // namespace

void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx) {
  check_operands(
      fits(o, lse, q, k, v, segments), "attention", kRule,
      {{"o", o}, {"lse", lse}, {"q", q}, {"k", k}, {"v", v}, {"segments", segments.starts()}});
  if (q.device.is_plan())
    return plan_scratch(q, k, /*backward=*/false, ctx);
  ROWSHARD_DISPATCH(q.device, attention(o, lse, q, k, v, segments, scale, ctx));
}

void attention_backward(const View& dq, const View& dk, const View& dv, const ConstView& d_o,
                        const ConstView& q, const ConstView& k, const ConstView& v,
                        const ConstView& o, const ConstView& lse, const Segments& segments,
                        double scale, Context& ctx) {
  check_operands(
      fits(o, lse, q, k, v, segments) && same_operands(q, {dq, d_o}) && same_operands(k, {dk, dv}),
      "attention_backward", kRule,
      {{"dq", dq},
       {"dk", dk},
       {"dv", dv},
       {"do", d_o},
       {"q", q},
       {"k", k},
       {"v", v},
       {"o", o},
       {"lse", lse},
       {"segments", segments.starts()}});
  if (q.device.is_plan())
    return plan_scratch(q, k, /*backward=*/true, ctx);
  ROWSHARD_DISPATCH(q.device,
                    attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, segments, scale, ctx));
}

}  // namespace rowshard
