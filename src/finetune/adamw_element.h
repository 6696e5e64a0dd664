// One element of adamw.h, shared by the host loop and the kernel.
//
// The only products followed by a sum are explicit fmaf, so a compiler that contracts and one that
// does not give the same bits.
#pragma once

#include <cmath>

#include "finetune/adamw.h"

namespace rowshard {

ROWSHARD_HD inline void adamw_element(const AdamWConstants& c, float g, float& p, float& m,
                                      float& v) {
  m = fmaf(c.beta1, m, c.one_minus_beta1 * g);
  v = fmaf(c.beta2, v, c.one_minus_beta2 * g * g);
  const float denominator = sqrtf(v) / c.sqrt_correction2 + c.epsilon;
  p = fmaf(-c.step_size, m / denominator, p * c.decay);
}

}  // namespace rowshard
