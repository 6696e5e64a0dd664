#include <cmath>

#include "finetune/adamw.h"
#include "finetune/adamw_element.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void adamw(const AdamWVectors& vectors, Argument<AdamWConstants> constants, Stream& stream);
}
#endif

namespace host {

void adamw(const AdamWVectors& vectors, Argument<AdamWConstants> constants, Stream&) {
  const float scale = vectors.gradient_scale.data ? *vectors.gradient_scale.as<float>() : 1.0f;
  if (!std::isfinite(scale))
    return;
  const int64_t n = vectors.parameters.elements();
  float* __restrict p = vectors.parameters.as<float>();
  float* __restrict m = vectors.m.as<float>();
  float* __restrict v = vectors.v.as<float>();
  const float* __restrict g = vectors.gradients.as<float>();
  const AdamWConstants c = constants.get();
#pragma omp parallel for simd if (n > 65536)
  for (int64_t i = 0; i < n; ++i)
    adamw_element(c, g[i] * scale, p[i], m[i], v[i]);
  if (!vectors.compute.data)
    return;
  bf16* __restrict compute = vectors.compute.as<bf16>();
#pragma omp parallel for simd if (n > 65536)
  for (int64_t i = 0; i < n; ++i)
    compute[i] = bf16(p[i]);
}

}  // namespace host

AdamWConstants adamw_constants(const AdamW& hyper, int64_t step) {
  const auto in_unit = [](double beta) { return beta >= 0 && beta < 1; };
  ROWSHARD_CHECK(step >= 1 && in_unit(hyper.beta1) && in_unit(hyper.beta2) && hyper.epsilon >= 0 &&
                     hyper.lr >= 0 && hyper.weight_decay >= 0 && std::isfinite(hyper.lr),
                 LogicError, "adamw: step ", step, ", lr ", hyper.lr, ", beta1 ", hyper.beta1,
                 ", beta2 ", hyper.beta2, ", epsilon ", hyper.epsilon, ", weight decay ",
                 hyper.weight_decay);
  const double correction1 = 1 - std::pow(hyper.beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(hyper.beta2, static_cast<double>(step));
  return {.decay = static_cast<float>(1 - hyper.lr * hyper.weight_decay),
          .beta1 = static_cast<float>(hyper.beta1),
          .one_minus_beta1 = static_cast<float>(1 - hyper.beta1),
          .beta2 = static_cast<float>(hyper.beta2),
          .one_minus_beta2 = static_cast<float>(1 - hyper.beta2),
          .step_size = static_cast<float>(hyper.lr / correction1),
          .sqrt_correction2 = static_cast<float>(std::sqrt(correction2)),
          .epsilon = static_cast<float>(hyper.epsilon)};
}

void adamw(const AdamWVectors& vectors, Argument<AdamWConstants> constants, Stream& stream) {
  const View& p = vectors.parameters;
  const auto fits = [&](const ConstView& x, DType dtype, int64_t count) {
    return x.dtype == dtype && x.elements() == count && x.device == stream.device();
  };
  const int64_t n = p.elements();
  ROWSHARD_CHECK(fits(p, DType::kF32, n) && fits(vectors.gradients, DType::kF32, n) &&
                     fits(vectors.m, DType::kF32, n) && fits(vectors.v, DType::kF32, n) &&
                     (!vectors.compute.data || fits(vectors.compute, DType::kBF16, n)) &&
                     (!vectors.gradient_scale.data || fits(vectors.gradient_scale, DType::kF32, 1)),
                 ShapeError, "adamw on ", stream.device(), ": parameters ", describe(p),
                 ", gradients ", describe(vectors.gradients), ", m ", describe(vectors.m), ", v ",
                 describe(vectors.v), ", compute copy ", describe(vectors.compute),
                 ", gradient scale ", describe(vectors.gradient_scale));
  if (n == 0)
    return;
  ROWSHARD_DISPATCH(stream.device(), adamw(vectors, constants, stream));
}

}  // namespace rowshard
