#include <algorithm>

#include "core/cuda_check.h"
#include "core/view.h"

namespace rowshard::cuda {
namespace {

template <typename To, typename From>
__global__ void convert_kernel(To* to, const From* from, int64_t count) {
  const int64_t stride = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    to[i] = static_cast<To>(static_cast<float>(from[i]));
  }
}

template <typename To>
void convert_from(const View& destination, const ConstView& source, Stream& stream) {
  const int64_t count = source.elements();
  const int blocks = static_cast<int>(std::min<int64_t>(ceil_div(count, 256), 132 * 16));
  To* to = destination.as<To>();
  switch (source.dtype) {
    case DType::kF32:
      convert_kernel<<<blocks, 256, 0, native(stream)>>>(to, source.as<float>(), count);
      break;
    case DType::kF16:
      convert_kernel<<<blocks, 256, 0, native(stream)>>>(to, source.as<f16>(), count);
      break;
    case DType::kBF16:
      convert_kernel<<<blocks, 256, 0, native(stream)>>>(to, source.as<bf16>(), count);
      break;
    default:
      throw ShapeError(message("convert on cuda: no conversion from ", to_string(source.dtype)));
  }
  CUDA_CHECK_LAUNCH("convert");
}

}  // namespace

void convert(const View& destination, const ConstView& source, Stream& stream) {
  switch (destination.dtype) {
    case DType::kF32:
      return convert_from<float>(destination, source, stream);
    case DType::kF16:
      return convert_from<f16>(destination, source, stream);
    case DType::kBF16:
      return convert_from<bf16>(destination, source, stream);
    default:
      throw ShapeError(message("convert on cuda: no conversion to ", to_string(destination.dtype)));
  }
}

}  // namespace rowshard::cuda
