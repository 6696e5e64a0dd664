#include "fp8/quantize_kernel.cuh"

namespace rowshard::cuda {

void quantize_mx_1x32(const QuantizeParams& p, Fp8Format format, DType x, Stream& stream) {
  quantize_grouping<Grouping::kMx1x32>(p, format, x, stream);
}

}  // namespace rowshard::cuda
