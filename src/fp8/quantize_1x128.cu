#include "fp8/quantize_kernel.cuh"

namespace rowshard::cuda {

void quantize_1x128(const QuantizeParams& p, Fp8Format format, DType x, Stream& stream) {
  quantize_grouping<Grouping::k1x128>(p, format, x, stream);
}

}  // namespace rowshard::cuda
