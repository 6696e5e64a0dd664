// The scalar part of gradient_clip.h, shared by both devices.
#pragma once

#include <cmath>

#include "core/dtype.h"

namespace rowshard {

struct ClipResult {
  float factor;
  float norm;
};

ROWSHARD_HD inline ClipResult clip_factor(double squares, float clip_norm) {
  const float norm = static_cast<float>(sqrt(squares));
  // norm - norm is 0 for a finite norm and NaN for an infinite one or a NaN.
  if (norm - norm != 0)
    return {norm - norm, norm};
  const float clip = clip_norm > 0 ? clip_norm / (norm + 1e-6f) : 1.0f;
  return {clip < 1 ? clip : 1.0f, norm};
}

}  // namespace rowshard
