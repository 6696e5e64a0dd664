#include <limits>

#include "layers/dispatch.h"
#include "layers/embedding.h"
#include "layers/kernel.cuh"

namespace rowshard::cuda {
namespace {

template <typename To, typename From, int kWidth>
__global__ void lookup_kernel(To* y, const From* table, const int32_t* ids, int64_t first,
                              int64_t rows, int64_t vocabulary, int64_t width) {
  const int64_t token = blockIdx.x;
  const int64_t id = ids[token];
  const bool held = id >= first && id < first + rows;
  const float otherwise =  // another rank's row, or no token at all
      id >= 0 && id < vocabulary ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  const From* from = table + (held ? id - first : 0) * width;
  To* to = y + token * width;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    const auto in = load<kWidth>(from + i);
    Pack<To, kWidth> out;
    for (int e = 0; e < kWidth; ++e) {
      out.values[e] = static_cast<To>(held ? widen(in.values[e]) : otherwise);
    }
    store(to + i, out);
  }
}

template <typename To, typename From>
void launch(const View& y, const ConstView& table, int64_t first, int64_t vocabulary,
            const ConstView& ids, Stream& stream) {
  const int64_t width = y.dim(1);
  const auto run = [&]<int kWidth>() {
    lookup_kernel<To, From, kWidth><<<static_cast<unsigned>(y.dim(0)),
                                      threads_for_row(width / kWidth, 256), 0, native(stream)>>>(
        y.as<To>(), table.as<From>(), ids.as<int32_t>(), first, table.dim(0), vocabulary, width);
  };
  // The wider type decides: a pack of both must not exceed 16 bytes.
  wide<To>(width, {y.data, table.data}) ? run.template operator()<kWide<To>>()
                                        : run.template operator()<1>();
}

}  // namespace

void embedding_lookup_part(const View& y, const ConstView& table, int64_t first, int64_t vocabulary,
                           const ConstView& ids, Stream& stream) {
  if (y.dtype != table.dtype) {
    launch<float, bf16>(y, table, first, vocabulary, ids, stream);
  } else {
    for_cuda_type(y.dtype, "embedding_lookup", [&](auto type) {
      using T = decltype(type);
      launch<T, T>(y, table, first, vocabulary, ids, stream);
    });
  }
  CUDA_CHECK_LAUNCH("embedding_lookup");
}

}  // namespace rowshard::cuda
