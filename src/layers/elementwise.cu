#include "layers/dispatch.h"
#include "layers/elementwise.h"
#include "layers/kernel.cuh"
#include "layers/reduction.h"

namespace rowshard::cuda {
namespace {

template <typename T, int kWidth>
__global__ void add_kernel(T* c, const T* a, const T* b, int64_t count) {
  const int64_t stride = int64_t{blockDim.x} * gridDim.x * kWidth;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kWidth; i < count;
       i += stride) {
    auto left = load<kWidth>(a + i);
    const auto right = load<kWidth>(b + i);
    for (int e = 0; e < kWidth; ++e) {
      left.values[e] = narrow<T>(widen(left.values[e]) + widen(right.values[e]));
    }
    store(c + i, left);
  }
}

template <typename T, int kWidth>
__global__ void scale_kernel(T* x, float factor, int64_t count) {
  const int64_t stride = int64_t{blockDim.x} * gridDim.x * kWidth;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kWidth; i < count;
       i += stride) {
    auto pack = load<kWidth>(x + i);
    for (int e = 0; e < kWidth; ++e)
      pack.values[e] = narrow<T>(widen(pack.values[e]) * factor);
    store(x + i, pack);
  }
}

// One block a row of y. Row numbers in range are the caller's contract.
template <typename T, int kWidth>
__global__ void gather_kernel(T* y, const T* x, const int32_t* rows, int64_t width) {
  // Without row numbers, the one row there is: a broadcast.
  const int64_t row = rows ? rows[blockIdx.x] : 0;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    store(y + blockIdx.x * width + i, load<kWidth>(x + row * width + i));
  }
}

template <typename T, int kWidth>
__global__ void scatter_add_kernel(T* x, const T* y, const int32_t* rows, int64_t width) {
  T* to = x + rows[blockIdx.x] * width;
  const T* from = y + blockIdx.x * width;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    auto sum = load<kWidth>(to + i);
    const auto in = load<kWidth>(from + i);
    for (int e = 0; e < kWidth; ++e) {
      sum.values[e] = narrow<T>(widen(sum.values[e]) + widen(in.values[e]));
    }
    store(to + i, sum);
  }
}

template <typename T>
void gather(const View& y, const ConstView& x, const int32_t* rows, Stream& stream) {
  const int64_t width = y.cols();
  const auto launch = [&]<int kWidth>() {
    gather_kernel<T, kWidth>
        <<<static_cast<unsigned>(y.dim(0)), threads_for_row(width / kWidth, 256), 0,
           native(stream)>>>(y.as<T>(), x.as<T>(), rows, width);
  };
  wide<T>(width, {y.data, x.data}) ? launch.template operator()<kWide<T>>()
                                   : launch.template operator()<1>();
}

// The order of layers/reduction.h: kReductionLanes threads, each a lane. The sum is thread 0's.
template <typename Term>
__device__ double chunk_sum(int64_t count, Term term) {
  __shared__ double lanes[kReductionLanes];
  double mine = 0;
  for (int64_t i = threadIdx.x; i < count; i += kReductionLanes)
    mine += term(i);
  lanes[threadIdx.x] = mine;
  for (int half = kReductionLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      lanes[threadIdx.x] += lanes[threadIdx.x + half];
  }
  return threadIdx.x == 0 ? lanes[0] : 0;  // only its writer may read it without another barrier
}

template <typename T>
struct ElementTerm {
  const T* x;
  bool squares;
  __device__ double operator()(int64_t i) const {
    const double value = static_cast<double>(widen(x[i]));
    return squares ? value * value : value;  // exact: twice 24 bits fit
  }
};
struct PartTerm {
  const double* parts;
  __device__ double operator()(int64_t i) const { return parts[i]; }
};

template <typename T>
__global__ void chunk_kernel(double* parts, const T* x, int64_t count, bool squares) {
  const int64_t begin = blockIdx.x * kReductionChunk;
  const int64_t length = count - begin < kReductionChunk ? count - begin : kReductionChunk;
  const double total = chunk_sum(length, ElementTerm<T>{x + begin, squares});
  if (threadIdx.x == 0)
    parts[blockIdx.x] = total;
}

__global__ void total_kernel(double* result, const double* parts, int64_t chunks, bool accumulate) {
  const double total = chunk_sum(chunks, PartTerm{parts});
  if (threadIdx.x == 0)
    *result = accumulate ? *result + total : total;
}

template <typename T>
__global__ void nonfinite_kernel(int32_t* count, const T* x, int64_t elements) {
  const int64_t stride = int64_t{blockDim.x} * gridDim.x;
  int32_t found = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < elements; i += stride) {
    found += isfinite(widen(x[i])) ? 0 : 1;
  }
  found = __reduce_add_sync(0xffffffffu, found);
  // Integers: the order of the additions does not show.
  if (threadIdx.x % 32 == 0 && found > 0)
    atomicAdd(count, found);
}

}  // namespace

void add(const View& c, const ConstView& a, const ConstView& b, Stream& stream) {
  for_cuda_type(c.dtype, "add", [&](auto type) {
    using T = decltype(type);
    const int64_t count = c.elements();
    const auto launch = [&]<int kWidth>() {
      add_kernel<T, kWidth><<<grid_for(count / kWidth), kThreads, 0, native(stream)>>>(
          c.as<T>(), a.as<T>(), b.as<T>(), count);
    };
    wide<T>(count, {c.data, a.data, b.data}) ? launch.template operator()<kWide<T>>()
                                             : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("add");
}

void scale(const View& x, double factor, Stream& stream) {
  for_cuda_type(x.dtype, "scale", [&](auto type) {
    using T = decltype(type);
    const int64_t count = x.elements();
    const auto launch = [&]<int kWidth>() {
      scale_kernel<T, kWidth><<<grid_for(count / kWidth), kThreads, 0, native(stream)>>>(
          x.as<T>(), static_cast<float>(factor), count);
    };
    wide<T>(count, {x.data}) ? launch.template operator()<kWide<T>>()
                             : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("scale");
}

void broadcast_row(const View& y, const ConstView& row, Stream& stream) {
  for_cuda_type(y.dtype, "broadcast_row",
                [&](auto type) { gather<decltype(type)>(y, row, nullptr, stream); });
  CUDA_CHECK_LAUNCH("broadcast_row");
}

void gather_rows(const View& y, const ConstView& x, const ConstView& rows, Stream& stream) {
  for_cuda_type(y.dtype, "gather_rows",
                [&](auto type) { gather<decltype(type)>(y, x, rows.as<int32_t>(), stream); });
  CUDA_CHECK_LAUNCH("gather_rows");
}

void scatter_add_rows(const View& x, const ConstView& y, const ConstView& rows, Stream& stream) {
  for_cuda_type(x.dtype, "scatter_add_rows", [&](auto type) {
    using T = decltype(type);
    const int64_t width = x.cols();
    const auto launch = [&]<int kWidth>() {
      scatter_add_kernel<T, kWidth>
          <<<static_cast<unsigned>(y.dim(0)), threads_for_row(width / kWidth, 256), 0,
             native(stream)>>>(x.as<T>(), y.as<T>(), rows.as<int32_t>(), width);
    };
    wide<T>(width, {y.data, x.data}) ? launch.template operator()<kWide<T>>()
                                     : launch.template operator()<1>();
  });
  CUDA_CHECK_LAUNCH("scatter_add_rows");
}

void reduce(const View& result, const ConstView& x, bool squares, bool accumulate, Context& ctx) {
  const int64_t count = x.elements(), chunks = ceil_div(count, kReductionChunk);
  const cudaStream_t stream = native(ctx.stream);
  const Tensor parts = ctx.arena.tensor(Category::kWorkspace, "reduce.parts", DType::kF64,
                                        {std::max<int64_t>(chunks, 1)});
  for_cuda_type(x.dtype, "reduce", [&](auto type) {
    using T = decltype(type);
    if (chunks > 0) {
      chunk_kernel<<<static_cast<unsigned>(chunks), kReductionLanes, 0, stream>>>(
          parts.as<double>(), x.as<T>(), count, squares);
    }
  });
  total_kernel<<<1, kReductionLanes, 0, stream>>>(result.as<double>(), parts.as<double>(), chunks,
                                                  accumulate);
  CUDA_CHECK_LAUNCH("reduce");
}

void count_nonfinite(const View& count, const ConstView& x, bool accumulate, Stream& stream) {
  if (!accumulate)
    fill_bytes(count, 0, stream);
  if (x.elements() == 0)
    return;
  for_cuda_type(x.dtype, "count_nonfinite", [&](auto type) {
    using T = decltype(type);
    nonfinite_kernel<<<grid_for(x.elements()), kThreads, 0, native(stream)>>>(
        count.as<int32_t>(), x.as<T>(), x.elements());
  });
  CUDA_CHECK_LAUNCH("count_nonfinite");
}

}  // namespace rowshard::cuda
