// FlashAttention-2's tiling (Dao, 2023) on packed segments: the grid runs over tiles of the packed
// tokens, whatever segments they belong to, and every row masks what is not its own.
//
// Three passes, each with one owner for what it writes: forward and dq own 64 queries of a head,
// dkv owns 64 keys of a key head and goes through the queries of its whole group in order. A block
// has 4 warps, a warp 16 rows.
#include <climits>

#include "layers/attention_cuda.h"
#include "layers/kernel.cuh"
#include "layers/mma.cuh"

namespace rowshard::cuda {
namespace {

constexpr int kRows = 64;
constexpr int kAttentionThreads = 2 * kRows;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Problem {
  const bf16* q;  // [T, heads, D]
  const bf16* k;  // [T, kv_heads, D]
  const bf16* v;
  const bf16* o;  // backward only
  const bf16* d_o;
  const float* lse;       // [T, heads]; backward only
  const float* delta;     // [T, heads] do · o; backward only
  const int32_t* starts;  // [T]
  const int32_t* ends;    // [T]
  int tokens;
  int heads;
  int kv_heads;
  float scale;

  __device__ int group() const { return heads / kv_heads; }
};

/// Maximum or sum over the four lanes that hold one row.
__device__ float row_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ float row_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

/// Writes a warp's 16 rows, times `factor` of each half, as bf16.
template <int D>
__device__ void store_rows(bf16* to, int64_t stride, int row, int limit,
                           const Accumulators<D>& values, const float (&factor)[2]) {
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    if (at >= limit)
      continue;
    for (int n = 0; n < D / 8; ++n) {
      *reinterpret_cast<uint32_t*>(to + at * stride + 8 * n + lane_col()) =
          pack_bf16(values.c[n][2 * half] * factor[half], values.c[n][2 * half + 1] * factor[half]);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kAttentionThreads)
    forward_kernel(Problem p, bf16* o, float* lse) {
  constexpr int kTile = kRows * kTileStride<D>;
  extern __shared__ __align__(16) bf16 shared[];
  bf16 *q_tile = shared, *k_tile = shared + kTile, *v_tile = shared + 2 * kTile;

  // The last tiles have the most keys: start them first.
  const int first = (gridDim.x - 1 - blockIdx.x) * kRows;
  const int head = blockIdx.y, kv_head = head / p.group();
  const int64_t stride = int64_t{p.heads} * D, kv_stride = int64_t{p.kv_heads} * D;
  const int warp_row = threadIdx.x / 32 * 16;
  const int row = first + warp_row + lane_row();
  int start[2];
  for (int half = 0; half < 2; ++half) {
    start[half] = row + 8 * half < p.tokens ? p.starts[row + 8 * half] : INT_MAX;
  }
  load_tile<kRows, D>(q_tile, p.q + head * D, stride, first, p.tokens);

  Accumulators<D> sum;
  sum.clear();
  float maximum[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  const float scale = p.scale * kLog2E;
  const int end = min(first + kRows, p.tokens);
  for (int key = p.starts[first]; key < end; key += kRows) {
    __syncthreads();  // the tiles of before have been read
    load_tile<kRows, D>(k_tile, p.k + kv_head * D, kv_stride, key, p.tokens);
    load_tile<kRows, D>(v_tile, p.v + kv_head * D, kv_stride, key, p.tokens);
    __syncthreads();
    Accumulators<kRows> s;
    multiply_rows<kRows, D>(s, q_tile + warp_row * kTileStride<D>, k_tile);

    float highest[2] = {-INFINITY, -INFINITY};
    for (int n = 0; n < kRows / 8; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int half = e / 2, column = key + 8 * n + lane_col() + e % 2;
        const bool visible = column >= start[half] && column <= row + 8 * half;
        s.c[n][e] = visible ? s.c[n][e] * scale : -INFINITY;
        highest[half] = fmaxf(highest[half], s.c[n][e]);
      }
    }
    float shift[2];
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(maximum[half], row_maximum(highest[half]));
      // A row that has seen no key yet keeps a shift of 0: −∞ − (−∞) would be NaN.
      shift[half] = highest[half] == -INFINITY ? 0 : highest[half];
      const float factor = exp2f(maximum[half] - shift[half]);
      maximum[half] = highest[half];
      total[half] *= factor;
      for (int n = 0; n < D / 8; ++n) {
        sum.c[n][2 * half] *= factor;
        sum.c[n][2 * half + 1] *= factor;
      }
    }
    for (int n = 0; n < kRows / 8; ++n) {
      for (int e = 0; e < 4; ++e) {
        s.c[n][e] = exp2f(s.c[n][e] - shift[e / 2]);
        total[e / 2] += s.c[n][e];
      }
    }
    add_product<D, kRows>(sum, s, v_tile);
  }

  float inverse[2];
  for (int half = 0; half < 2; ++half) {
    total[half] = row_sum(total[half]);
    inverse[half] = 1 / total[half];
    if (threadIdx.x % 4 == 0 && row + 8 * half < p.tokens) {
      lse[(row + 8 * half) * int64_t{p.heads} + head] = (maximum[half] + log2f(total[half])) * kLn2;
    }
  }
  store_rows<D>(o + head * D, stride, row, p.tokens, sum, inverse);
}

// delta[t, h] = do · o: a warp a row.
__global__ void delta_kernel(float* delta, const bf16* d_o, const bf16* o, int64_t rows,
                             int head_dim) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  if (row >= rows)
    return;
  float dot = 0;
  for (int i = threadIdx.x % 32; i < head_dim; i += 32) {
    dot += widen(d_o[row * head_dim + i]) * widen(o[row * head_dim + i]);
  }
  dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0)
    delta[row] = dot;
}

template <int D>
__global__ void __launch_bounds__(kAttentionThreads) dq_kernel(Problem p, bf16* dq) {
  constexpr int kTile = kRows * kTileStride<D>;
  extern __shared__ __align__(16) bf16 shared[];
  bf16 *q_tile = shared, *do_tile = shared + kTile;
  bf16 *k_tile = shared + 2 * kTile, *v_tile = shared + 3 * kTile;

  const int first = (gridDim.x - 1 - blockIdx.x) * kRows;
  const int head = blockIdx.y, kv_head = head / p.group();
  const int64_t stride = int64_t{p.heads} * D, kv_stride = int64_t{p.kv_heads} * D;
  const int warp_row = threadIdx.x / 32 * 16;
  const int row = first + warp_row + lane_row();
  int start[2];
  float lse[2], delta[2];
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    const bool inside = at < p.tokens;
    start[half] = inside ? p.starts[at] : INT_MAX;
    lse[half] = inside ? p.lse[int64_t{at} * p.heads + head] * kLog2E : 0;
    delta[half] = inside ? p.delta[int64_t{at} * p.heads + head] : 0;
  }
  load_tile<kRows, D>(q_tile, p.q + head * D, stride, first, p.tokens);
  load_tile<kRows, D>(do_tile, p.d_o + head * D, stride, first, p.tokens);

  Accumulators<D> sum;
  sum.clear();
  const float scale = p.scale * kLog2E;
  const int end = min(first + kRows, p.tokens);
  for (int key = p.starts[first]; key < end; key += kRows) {
    __syncthreads();
    load_tile<kRows, D>(k_tile, p.k + kv_head * D, kv_stride, key, p.tokens);
    load_tile<kRows, D>(v_tile, p.v + kv_head * D, kv_stride, key, p.tokens);
    __syncthreads();
    Accumulators<kRows> s, ds;
    multiply_rows<kRows, D>(s, q_tile + warp_row * kTileStride<D>, k_tile);
    multiply_rows<kRows, D>(ds, do_tile + warp_row * kTileStride<D>, v_tile);
    for (int n = 0; n < kRows / 8; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int half = e / 2, column = key + 8 * n + lane_col() + e % 2;
        const bool visible = column >= start[half] && column <= row + 8 * half;
        const float probability = visible ? exp2f(s.c[n][e] * scale - lse[half]) : 0;
        ds.c[n][e] = probability * (ds.c[n][e] - delta[half]);
      }
    }
    add_product<D, kRows>(sum, ds, k_tile);
  }
  store_rows<D>(dq + head * D, stride, row, p.tokens, sum, {p.scale, p.scale});
}

/// Queries of one step of dkv: with D = 128 two accumulators of 64 registers leave room for 32.
template <int D>
inline constexpr int kQueries = D <= 64 ? 64 : 32;

template <int D>
__global__ void __launch_bounds__(kAttentionThreads) dkv_kernel(Problem p, bf16* dk, bf16* dv) {
  constexpr int kTile = kRows * kTileStride<D>, kQueryTile = kQueries<D> * kTileStride<D>;
  extern __shared__ __align__(16) bf16 shared[];
  bf16 *k_tile = shared, *v_tile = shared + kTile;
  bf16 *q_tile = shared + 2 * kTile, *do_tile = q_tile + kQueryTile;
  __shared__ float lse[kQueries<D>], delta[kQueries<D>];

  // The first tiles have the most queries, so the order of the blocks is right as it is.
  const int first = blockIdx.x * kRows;
  const int kv_head = blockIdx.y;
  const int64_t stride = int64_t{p.heads} * D, kv_stride = int64_t{p.kv_heads} * D;
  const int warp_row = threadIdx.x / 32 * 16;
  const int row = first + warp_row + lane_row();  // of keys: the products here are transposed
  int end[2];
  for (int half = 0; half < 2; ++half) {
    end[half] = row + 8 * half < p.tokens ? p.ends[row + 8 * half] : 0;
  }
  load_tile<kRows, D>(k_tile, p.k + kv_head * D, kv_stride, first, p.tokens);
  load_tile<kRows, D>(v_tile, p.v + kv_head * D, kv_stride, first, p.tokens);

  Accumulators<D> sum_k, sum_v;
  sum_k.clear();
  sum_v.clear();
  const float scale = p.scale * kLog2E;
  const int last = p.ends[min(first + kRows, p.tokens) - 1];
  for (int head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
    for (int query = first; query < last; query += kQueries<D>) {
      __syncthreads();
      load_tile<kQueries<D>, D>(q_tile, p.q + head * D, stride, query, p.tokens);
      load_tile<kQueries<D>, D>(do_tile, p.d_o + head * D, stride, query, p.tokens);
      for (int i = threadIdx.x; i < kQueries<D>; i += blockDim.x) {
        const bool inside = query + i < p.tokens;
        const int64_t at = int64_t{query + i} * p.heads + head;
        lse[i] = inside ? p.lse[at] * kLog2E : 0;
        delta[i] = inside ? p.delta[at] : 0;
      }
      __syncthreads();
      Accumulators<kQueries<D>> s, ds;  // [keys, queries]
      multiply_rows<kQueries<D>, D>(s, k_tile + warp_row * kTileStride<D>, q_tile);
      multiply_rows<kQueries<D>, D>(ds, v_tile + warp_row * kTileStride<D>, do_tile);
      for (int n = 0; n < kQueries<D> / 8; ++n) {
        for (int e = 0; e < 4; ++e) {
          const int half = e / 2, i = 8 * n + lane_col() + e % 2;
          const bool visible = query + i >= row + 8 * half && query + i < end[half];
          s.c[n][e] = visible ? exp2f(s.c[n][e] * scale - lse[i]) : 0;
          ds.c[n][e] = s.c[n][e] * (ds.c[n][e] - delta[i]);
        }
      }
      add_product<D, kQueries<D>>(sum_v, s, do_tile);
      add_product<D, kQueries<D>>(sum_k, ds, q_tile);
    }
  }
  store_rows<D>(dk + kv_head * D, kv_stride, row, p.tokens, sum_k, {p.scale, p.scale});
  store_rows<D>(dv + kv_head * D, kv_stride, row, p.tokens, sum_v, {1, 1});
}

/// Whoever runs, the same operands.
void check_head_dim(const ConstView& q) {
  ROWSHARD_CHECK(q.dtype == DType::kBF16, ShapeError, "attention on cuda takes bf16; got q ",
                 describe(q));
  const int64_t d = q.dim(2);
  ROWSHARD_CHECK(d == 16 || d == 32 || d == 64 || d == 128, ShapeError,
                 "attention on cuda takes head sizes 16, 32, 64 and 128; got q ", describe(q));
}

/// f.operator()<D>() for the head sizes there are kernels for.
template <typename F>
void for_head_dim(const ConstView& q, F&& f) {
  switch (q.dim(2)) {
    case 16:
      return f.template operator()<16>();
    case 32:
      return f.template operator()<32>();
    case 64:
      return f.template operator()<64>();
    default:
      return f.template operator()<128>();
  }
}

void check_alignment(std::initializer_list<ConstView> operands) {
  for (const ConstView& operand : operands) {
    ROWSHARD_CHECK(reinterpret_cast<uintptr_t>(operand.data) % 16 == 0, ShapeError,
                   "attention on cuda reads 16 bytes at a time; an operand ", describe(operand),
                   " starts at an address that is not a multiple of 16");
  }
}

Problem problem_of(const ConstView& q, const ConstView& k, const ConstView& v,
                   const Segments& segments, double scale) {
  Problem p{};
  p.q = q.as<bf16>();
  p.k = k.as<bf16>();
  p.v = v.as<bf16>();
  p.starts = segments.starts().as<int32_t>();
  p.ends = segments.ends().as<int32_t>();
  p.tokens = static_cast<int>(q.dim(0));
  p.heads = static_cast<int>(q.dim(1));
  p.kv_heads = static_cast<int>(k.dim(1));
  p.scale = static_cast<float>(scale);
  return p;
}

/// Launches with `elements` of dynamic shared memory, which may exceed the default limit of 48 KiB.
template <typename Kernel, typename... Args>
void launch(Kernel kernel, int rows, int heads, int elements, Stream& stream, Args... args) {
  const int bytes = elements * static_cast<int>(sizeof(bf16));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, kRows)), static_cast<unsigned>(heads));
  kernel<<<grid, kAttentionThreads, bytes, native(stream)>>>(args...);
}

}  // namespace

void own_attention(const AttentionOperands& x, const Segments& segments, float* delta,
                   Context& ctx) {
  check_head_dim(x.q);
  for_head_dim(x.q, [&]<int D>() {
    Problem p = problem_of(x.q, x.k, x.v, segments, x.scale);
    if (!x.backward()) {
      launch(forward_kernel<D>, p.tokens, p.heads, 3 * kRows * kTileStride<D>, ctx.stream, p,
             x.o.as<bf16>(), x.lse.as<float>());
      CUDA_CHECK_LAUNCH("attention");
      return;
    }
    p.o = x.o.as<bf16>();
    p.d_o = x.d_o.as<bf16>();
    p.lse = x.lse.as<float>();
    p.delta = delta;
    const int64_t rows = int64_t{p.tokens} * p.heads;
    delta_kernel<<<static_cast<unsigned>(ceil_div(rows, kThreads / 32)), kThreads, 0,
                   native(ctx.stream)>>>(delta, p.d_o, p.o, rows, D);
    launch(dq_kernel<D>, p.tokens, p.heads, 4 * kRows * kTileStride<D>, ctx.stream, p,
           x.dq.as<bf16>());
    launch(dkv_kernel<D>, p.tokens, p.kv_heads, 2 * (kRows + kQueries<D>)*kTileStride<D>,
           ctx.stream, p, x.dk.as<bf16>(), x.dv.as<bf16>());
    CUDA_CHECK_LAUNCH("attention_backward");
  });
}

namespace {

__global__ void table_kernel(int64_t* offsets, int64_t* kv_offsets, int64_t* lse_offsets,
                             int32_t* lengths, const int32_t* by_length, int64_t tokens,
                             int64_t entries, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= entries)
    return;
  const int64_t start = i < tokens ? by_length[2 * i] : tokens;
  offsets[i] = start * heads * head_dim;
  kv_offsets[i] = start * kv_heads * head_dim;
  lse_offsets[i] = start * heads;
  lengths[i] = i < tokens ? by_length[2 * i + 1] : 0;
}

void* writable(const ConstView& view) {
  return const_cast<void*>(view.data);
}

/// Views of what a pass reads and writes; o and lse are written by forward only.
AttentionOperands operands_of(const ConstView& o, const ConstView& lse, const ConstView& q,
                              const ConstView& k, const ConstView& v, double scale) {
  AttentionOperands x{};
  x.o = View(writable(o), o.dtype, o.shape, o.device);
  x.lse = View(writable(lse), lse.dtype, lse.shape, lse.device);
  x.q = q;
  x.k = k;
  x.v = v;
  x.scale = scale;
  return x;
}

}  // namespace

void attention_table(const View& table, const ConstView& by_length, int64_t entries, int64_t heads,
                     int64_t kv_heads, int64_t head_dim, Stream& stream) {
  const int64_t tokens = by_length.dim(0), room = AttentionScratch::table_entries(tokens);
  auto* offsets = reinterpret_cast<int64_t*>(table.byte_data());
  table_kernel<<<static_cast<unsigned>(ceil_div(entries, kThreads)), kThreads, 0, native(stream)>>>(
      offsets, offsets + room, offsets + 2 * room, reinterpret_cast<int32_t*>(offsets + 3 * room),
      by_length.as<int32_t>(), tokens, entries, heads, kv_heads, head_dim);
  CUDA_CHECK_LAUNCH("attention_table");
}

void attention(const View& o, const View& lse, const ConstView& q, const ConstView& k,
               const ConstView& v, const Segments& segments, double scale, Context& ctx) {
  check_head_dim(q);
  check_alignment({o, q, k, v});
  const AttentionScratch scratch(q, k, /*backward=*/false, ctx);
  const AttentionOperands x = operands_of(o, lse, q, k, v, scale);
  if (!cudnn_attention(x, segments, scratch, ctx))
    own_attention(x, segments, nullptr, ctx);
}

void attention_backward(const View& dq, const View& dk, const View& dv, const ConstView& d_o,
                        const ConstView& q, const ConstView& k, const ConstView& v,
                        const ConstView& o, const ConstView& lse, const Segments& segments,
                        double scale, Context& ctx) {
  check_head_dim(q);
  check_alignment({dq, dk, dv, d_o, q, k, v, o});
  const AttentionScratch scratch(q, k, /*backward=*/true, ctx);
  AttentionOperands x = operands_of(o, lse, q, k, v, scale);
  x.dq = dq;
  x.dk = dk;
  x.dv = dv;
  x.d_o = d_o;
  if (!cudnn_attention(x, segments, scratch, ctx)) {
    // Where cuDNN was expected its workspace is there instead, and larger.
    float* delta = scratch.delta ? scratch.delta.as<float>()
                                 : reinterpret_cast<float*>(scratch.workspace.data());
    own_attention(x, segments, delta, ctx);
  }
}

}  // namespace rowshard::cuda
