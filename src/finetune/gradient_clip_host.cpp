#include "finetune/gradient_clip.h"
#include "finetune/gradient_clip_factor.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void gradient_scale(const View& result, const ConstView& squares, float clip_norm, Stream& stream);
}  // namespace cuda
#endif

namespace host {

void gradient_scale(const View& result, const ConstView& squares, float clip_norm, Stream&) {
  const ClipResult clip = clip_factor(*squares.as<double>(), clip_norm);
  result.as<float>()[0] = clip.factor;
  result.as<float>()[1] = clip.norm;
}

}  // namespace host

void gradient_scale(const View& result, const ConstView& squares, double clip_norm,
                    Stream& stream) {
  ROWSHARD_CHECK(result.dtype == DType::kF32 && result.elements() == 2 &&
                     squares.dtype == DType::kF64 && squares.elements() == 1 &&
                     result.device == stream.device() && squares.device == stream.device(),
                 ShapeError, "gradient_scale on ", stream.device(), ": result ", describe(result),
                 ", squares ", describe(squares));
  ROWSHARD_CHECK(clip_norm >= 0, LogicError, "gradient_scale: clip norm ", clip_norm);
  ROWSHARD_DISPATCH(stream.device(),
                    gradient_scale(result, squares, static_cast<float>(clip_norm), stream));
}

}  // namespace rowshard
