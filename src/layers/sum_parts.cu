#include "layers/dispatch.h"
#include "layers/kernel.cuh"
#include "layers/tensor_parallel.h"

namespace rowshard::cuda {
namespace {

struct Parts {
  const void* data[kMostParts];
  int count;
};

// One block a row, so that the column of the bias needs no division.
template <typename T, typename P, int kWidth>
__global__ void sum_parts_kernel(T* y, Parts parts, const T* bias, int64_t width) {
  const int64_t row = blockIdx.x * width;
  for (int64_t i = threadIdx.x * kWidth; i < width; i += blockDim.x * kWidth) {
    float sums[kWidth];
    const auto first = load<kWidth>(static_cast<const P*>(parts.data[0]) + row + i);
    for (int e = 0; e < kWidth; ++e)
      sums[e] = widen(first.values[e]);
    for (int part = 1; part < parts.count; ++part) {
      const auto next = load<kWidth>(static_cast<const P*>(parts.data[part]) + row + i);
      for (int e = 0; e < kWidth; ++e)
        sums[e] += widen(next.values[e]);
    }
    if (bias) {
      const auto shift = load<kWidth>(bias + i);
      for (int e = 0; e < kWidth; ++e)
        sums[e] += widen(shift.values[e]);
    }
    Pack<T, kWidth> out;
    for (int e = 0; e < kWidth; ++e)
      out.values[e] = narrow<T>(sums[e]);
    store(y + row + i, out);
  }
}

template <typename T, typename P>
void launch(const View& y, std::span<const ConstView> parts, const ConstView& bias,
            Stream& stream) {
  const int64_t width = y.dim(1);
  Parts table{};
  table.count = static_cast<int>(parts.size());
  bool aligned = wide<P>(width, {y.data, bias.data});
  for (size_t i = 0; i < parts.size(); ++i) {
    table.data[i] = parts[i].data;
    aligned = aligned && wide<P>(width, {parts[i].data});
  }
  const T* shift = bias.data ? bias.as<T>() : nullptr;
  const auto run = [&]<int kWidth>() {
    sum_parts_kernel<T, P, kWidth>
        <<<static_cast<unsigned>(y.dim(0)), threads_for_row(width / kWidth, 512), 0,
           native(stream)>>>(y.as<T>(), table, shift, width);
  };
  // The wider type decides: a pack must not exceed 16 bytes.
  aligned ? run.template operator()<kWide<P>>() : run.template operator()<1>();
}

}  // namespace

void sum_parts(const View& y, std::span<const ConstView> parts, const ConstView& bias,
               Stream& stream) {
  if (parts[0].dtype != y.dtype) {
    launch<bf16, float>(y, parts, bias, stream);
  } else {
    for_cuda_type(y.dtype, "sum_parts", [&](auto type) {
      using T = decltype(type);
      launch<T, T>(y, parts, bias, stream);
    });
  }
  CUDA_CHECK_LAUNCH("sum_parts");
}

}  // namespace rowshard::cuda
