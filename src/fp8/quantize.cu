#include "fp8/quantize.h"

#include "fp8/quantize_kernel.cuh"

namespace rowshard::cuda {

void quantize(const Fp8View* rowwise, const Fp8View* columnwise, const ConstView& x,
              const QuantizeOptions& options, Stream& stream) {
  QuantizeParams p{};
  p.x = x.data;
  p.rows = x.rows();
  p.cols = x.cols();
  if (rowwise) {
    p.row_codes = static_cast<uint8_t*>(rowwise->codes.data);
    p.row_scales = rowwise->scales.data;
    p.row_stride = rowwise->scales.dim(1);
    p.vector_rows = p.cols % 16 == 0 && aligned16(p.row_codes);
  }
  if (columnwise) {
    p.col_codes = static_cast<uint8_t*>(columnwise->codes.data);
    p.col_scales = columnwise->scales.data;
    p.col_stride = columnwise->scales.dim(1);
    p.vector_columns = p.rows % 16 == 0 && aligned16(p.col_codes);
  }
  p.vector_x = p.cols * size_of(x.dtype) % 16 == 0 && aligned16(x.data);
  p.largest_input = largest_finite(x.dtype);
  p.power_of_two = options.power_of_two;
  p.amax_epsilon = options.amax_epsilon;
  p.skip = options.skip;
  ROWSHARD_CHECK(ceil_div(p.rows, kTile) <= 65535, ShapeError, "quantize: ", describe(x),
                 " has more rows than one launch takes (8388480)");
  switch (rowwise ? rowwise->grouping : columnwise->grouping) {
    case Grouping::k1x128:
      return quantize_1x128(p, options.format, x.dtype, stream);
    case Grouping::k128x128:
      return quantize_128x128(p, options.format, x.dtype, stream);
    case Grouping::kMx1x32:
      return quantize_mx_1x32(p, options.format, x.dtype, stream);
    case Grouping::kMx32x32:
      return quantize_mx_32x32(p, options.format, x.dtype, stream);
  }
}

}  // namespace rowshard::cuda
