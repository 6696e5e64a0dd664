#include "finetune/gradient_clip.h"

#include "core/cuda_check.h"
#include "finetune/gradient_clip_factor.h"

namespace rowshard::cuda {
namespace {

__global__ void scale_kernel(float* result, const double* squares, float clip_norm) {
  const ClipResult clip = clip_factor(*squares, clip_norm);
  result[0] = clip.factor;
  result[1] = clip.norm;
}

}  // namespace

void gradient_scale(const View& result, const ConstView& squares, float clip_norm, Stream& stream) {
  scale_kernel<<<1, 1, 0, native(stream)>>>(result.as<float>(), squares.as<double>(), clip_norm);
  CUDA_CHECK_LAUNCH("gradient_scale");
}

}  // namespace rowshard::cuda
