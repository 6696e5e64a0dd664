#include <algorithm>
#include <vector>

#include "finetune/gradient_clip.h"
#include "finetune/gradient_clip_factor.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void sum_of_squares(const View& squares, const ConstView& x, bool accumulate, Context& ctx);
void gradient_scale(const View& result, const ConstView& squares, const ConstView& tokens,
                    float clip_norm, Context& ctx);
}  // namespace cuda
#endif

namespace host {

void sum_of_squares(const View& squares, const ConstView& x, bool accumulate, Context&) {
  // Chunks of fixed length, added in order: the result does not depend on the thread count.
  constexpr int64_t kChunk = 16384;
  const float* values = x.as<float>();
  const int64_t n = x.elements();
  std::vector<double> partial(ceil_div(n, kChunk), 0.0);
#pragma omp parallel for if (partial.size() > 4)
  for (int64_t chunk = 0; chunk < static_cast<int64_t>(partial.size()); ++chunk) {
    const int64_t end = std::min(n, (chunk + 1) * kChunk);
    double sum = 0;
    for (int64_t i = chunk * kChunk; i < end; ++i)
      sum += double{values[i]} * values[i];
    partial[chunk] = sum;
  }
  double total = accumulate ? *squares.as<float>() : 0.0;
  for (double sum : partial)
    total += sum;
  *squares.as<float>() = static_cast<float>(total);
}

void gradient_scale(const View& result, const ConstView& squares, const ConstView& tokens,
                    float clip_norm, Context&) {
  const ClipResult clip = clip_factor(*squares.as<float>(), *tokens.as<float>(), clip_norm);
  result.as<float>()[0] = clip.factor;
  result.as<float>()[1] = clip.norm;
}

}  // namespace host

namespace {

bool is_f32(const ConstView& x, int64_t count, const Context& ctx) {
  return x.dtype == DType::kF32 && x.elements() == count && x.device == ctx.device();
}

}  // namespace

void sum_of_squares(const View& squares, const ConstView& x, bool accumulate, Context& ctx) {
  ROWSHARD_CHECK(is_f32(squares, 1, ctx) && is_f32(x, x.elements(), ctx), ShapeError,
                 "sum_of_squares on ", ctx.device(), ": result ", describe(squares), ", vector ",
                 describe(x));
  ROWSHARD_DISPATCH(ctx.device(), sum_of_squares(squares, x, accumulate, ctx));
}

void gradient_scale(const View& result, const ConstView& squares, const ConstView& tokens,
                    double clip_norm, Context& ctx) {
  ROWSHARD_CHECK(is_f32(result, 2, ctx) && is_f32(squares, 1, ctx) && is_f32(tokens, 1, ctx),
                 ShapeError, "gradient_scale on ", ctx.device(), ": result ", describe(result),
                 ", squares ", describe(squares), ", tokens ", describe(tokens));
  ROWSHARD_CHECK(clip_norm >= 0, LogicError, "gradient_scale: clip norm ", clip_norm);
  ROWSHARD_DISPATCH(ctx.device(),
                    gradient_scale(result, squares, tokens, static_cast<float>(clip_norm), ctx));
}

}  // namespace rowshard
