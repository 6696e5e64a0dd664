#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "layers/attention.h"
#include "layers/dispatch.h"
#include "layers/host_math.h"

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

// Queries handled at once: enough for an efficient product, few enough that little of the block
// above the diagonal is computed for nothing.
constexpr int64_t kBlock = 64;

void gemm(CBLAS_TRANSPOSE transpose_a, CBLAS_TRANSPOSE transpose_b, int64_t m, int64_t n, int64_t k,
          float alpha, const float* a, int64_t lda, const float* b, int64_t ldb, float beta,
          float* c, int64_t ldc) {
  cblas_sgemm(CblasRowMajor, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c,
              ldc);
}
void gemm(CBLAS_TRANSPOSE transpose_a, CBLAS_TRANSPOSE transpose_b, int64_t m, int64_t n, int64_t k,
          double alpha, const double* a, int64_t lda, const double* b, int64_t ldb, double beta,
          double* c, int64_t ldc) {
  cblas_dgemm(CblasRowMajor, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c,
              ldc);
}

struct Dims {
  int64_t tokens, heads, kv_heads, head_dim;

  int64_t group() const { return heads / kv_heads; }
  int64_t row() const { return heads * head_dim; }  // between two tokens of one head
  int64_t kv_row() const { return kv_heads * head_dim; }
};

/// scores [rows, keys] = scale · q · kᵀ of the block whose first query is key `first`.
template <typename T>
void block_scores(T* scores, const T* q, const T* k, int64_t rows, int64_t keys, T scale,
                  const Dims& d) {
  gemm(CblasNoTrans, CblasTrans, rows, keys, d.head_dim, scale, q, d.row(), k, d.kv_row(), T{0},
       scores, keys);
}

/// Replaces a row's scores by exp(score − shift), and by 0 after its last visible key.
template <typename T>
T exponentiate(T* row, T shift, int64_t visible, int64_t keys) {
  T total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < visible; ++j) {
    row[j] = fast_exp(row[j] - shift);
    total += row[j];
  }
  std::fill(row + visible, row + keys, T{0});
  return total;
}

template <typename T>
void forward_head(T* o, T* lse, const T* q, const T* k, const T* v, int64_t length, T scale,
                  const Dims& d, T* scores) {
  for (int64_t first = 0; first < length; first += kBlock) {
    const int64_t rows = std::min(kBlock, length - first);
    const int64_t keys = first + rows;
    block_scores(scores, q + first * d.row(), k, rows, keys, scale, d);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = scores + i * keys;
      const int64_t visible = first + i + 1;
      T maximum = row[0];
#pragma omp simd reduction(max : maximum)
      for (int64_t j = 0; j < visible; ++j)
        maximum = std::max(maximum, row[j]);
      const T total = exponentiate(row, maximum, visible, keys);
      lse[first + i] = maximum + std::log(total);
      const T inverse = 1 / total;
#pragma omp simd
      for (int64_t j = 0; j < visible; ++j)
        row[j] *= inverse;
    }
    gemm(CblasNoTrans, CblasNoTrans, rows, d.head_dim, keys, T{1}, scores, keys, v, d.kv_row(),
         T{0}, o + first * d.row(), d.row());
  }
}

/// Adds to dk and dv, writes dq.
template <typename T>
void backward_head(T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v,
                   const T* o, const T* lse, int64_t length, T scale, const Dims& d, T* p, T* dp) {
  for (int64_t first = 0; first < length; first += kBlock) {
    const int64_t rows = std::min(kBlock, length - first);
    const int64_t keys = first + rows;
    const T* q_block = q + first * d.row();
    const T* grad = d_o + first * d.row();
    block_scores(p, q_block, k, rows, keys, scale, d);
    gemm(CblasNoTrans, CblasTrans, rows, keys, d.head_dim, T{1}, grad, d.row(), v, d.kv_row(), T{0},
         dp, keys);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = p + i * keys;
      T* drow = dp + i * keys;
      exponentiate(row, lse[first + i], first + i + 1, keys);
      // Σ_j p_j · dp_j = do · o, without another pass over the keys.
      T delta = 0;
#pragma omp simd reduction(+ : delta)
      for (int64_t c = 0; c < d.head_dim; ++c) {
        delta += grad[i * d.row() + c] * o[(first + i) * d.row() + c];
      }
#pragma omp simd
      for (int64_t j = 0; j < keys; ++j)
        drow[j] = row[j] * (drow[j] - delta) * scale;
    }
    gemm(CblasTrans, CblasNoTrans, keys, d.head_dim, rows, T{1}, p, keys, grad, d.row(), T{1}, dv,
         d.kv_row());
    gemm(CblasTrans, CblasNoTrans, keys, d.head_dim, rows, T{1}, dp, keys, q_block, d.row(), T{1},
         dk, d.kv_row());
    gemm(CblasNoTrans, CblasNoTrans, rows, d.head_dim, keys, T{1}, dp, keys, k, d.kv_row(), T{0},
         dq + first * d.row(), d.row());
  }
}

// Segments and heads are independent; scratch is one block of scores for each thread.
template <typename T>
void forward(T* o, T* lse, const T* q, const T* k, const T* v, const Segments& segments, T scale,
             const Dims& d) {
  const auto& bounds = segments.bounds();
#pragma omp parallel
  {
    std::vector<T> scores(kBlock * segments.longest());
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < segments.count(); ++s) {
      for (int64_t head = 0; head < d.heads; ++head) {
        const int64_t at = bounds[s] * d.row() + head * d.head_dim;
        const int64_t kv_at = bounds[s] * d.kv_row() + head / d.group() * d.head_dim;
        forward_head(o + at, lse + head * d.tokens + bounds[s], q + at, k + kv_at, v + kv_at,
                     int64_t{bounds[s + 1]} - bounds[s], scale, d, scores.data());
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
#pragma omp parallel
  {
    std::vector<T> p(kBlock * segments.longest()), dp(kBlock * segments.longest());
    // The query heads of one key head add to the same dk and dv: one thread, in order.
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < segments.count(); ++s) {
      for (int64_t kv_head = 0; kv_head < d.kv_heads; ++kv_head) {
        const int64_t kv_at = bounds[s] * d.kv_row() + kv_head * d.head_dim;
        for (int64_t head = kv_head * d.group(); head < (kv_head + 1) * d.group(); ++head) {
          const int64_t at = bounds[s] * d.row() + head * d.head_dim;
          backward_head(dq + at, dk + kv_at, dv + kv_at, d_o + at, q + at, k + kv_at, v + kv_at,
                        o + at, lse + head * d.tokens + bounds[s],
                        int64_t{bounds[s + 1]} - bounds[s], scale, d, p.data(), dp.data());
        }
      }
    }
  }
}

Dims dims_of(const ConstView& q, const ConstView& k) {
  return {q.dim(0), q.dim(1), k.dim(1), q.dim(2)};
}

/// A bf16 operand as f32 for the time of a call.
struct Wide {
  Tensor scratch;
  View view;

  Wide(const ConstView& x, bool read, Context& ctx)
      : scratch(ctx.arena.tensor(Category::kWorkspace, "attention.widened", DType::kF32, x.shape)),
        view(scratch) {
    if (read)
      convert(view, x, ctx.stream);
  }
};

}  // namespace

void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx) {
  const Dims d = dims_of(q, k);
  if (q.dtype == DType::kBF16) {
    const Wide wide_o(o, false, ctx), wide_q(q, true, ctx), wide_k(k, true, ctx),
        wide_v(v, true, ctx);
    host::attention(wide_o.view, lse, wide_q.view, wide_k.view, wide_v.view, segments, scale, ctx);
    convert(o, wide_o.view, ctx.stream);
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
    const Wide wide_dq(dq, false, ctx), wide_dk(dk, false, ctx), wide_dv(dv, false, ctx);
    const Wide wide_do(d_o, true, ctx), wide_q(q, true, ctx), wide_k(k, true, ctx),
        wide_v(v, true, ctx), wide_o(o, true, ctx);
    host::attention_backward(wide_dq.view, wide_dk.view, wide_dv.view, wide_do.view, wide_q.view,
                             wide_k.view, wide_v.view, wide_o.view, lse, segments, scale, ctx);
    convert(dq, wide_dq.view, ctx.stream);
    convert(dk, wide_dk.view, ctx.stream);
    convert(dv, wide_dv.view, ctx.stream);
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
         lse.shape == Shape{q.dim(1), q.dim(0)} && lse.dtype == accumulator_dtype(q.dtype) &&
         lse.device == q.device && segments.tokens() == q.dim(0) &&
         segments.starts().device == q.device;
}

constexpr const char* kRule =
    "q and o [T, Hq, D], k and v [T, Hkv, D] with Hkv a divisor of Hq, lse [Hq, T], segments of T "
    "tokens";

}  // namespace

void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx) {
  check_operands(
      fits(o, lse, q, k, v, segments), "attention", kRule,
      {{"o", o}, {"lse", lse}, {"q", q}, {"k", k}, {"v", v}, {"segments", segments.starts()}});
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
  ROWSHARD_DISPATCH(q.device,
                    attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, segments, scale, ctx));
}

}  // namespace rowshard
