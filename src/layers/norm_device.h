// For the sources of this room only: what norm.cu implements.
#pragma once

#include "layers/norm.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void norm_forward(const View& y, const Fp8View* y8, const View& statistics, const ConstView& x,
                  const Norm& norm, Stream& stream);
void norm_backward(const View& dx, const ConstView& dy, const ConstView& x, const Norm& norm,
                   const ConstView& statistics, bool accumulate, Stream& stream);
/// parts: layers/column_sum.h.
void norm_weight_gradient(const View& dweight, const View& parts, const ConstView& dy,
                          const ConstView& x, NormKind kind, const ConstView& statistics,
                          Stream& stream);
}  // namespace cuda
#endif

}  // namespace rowshard
