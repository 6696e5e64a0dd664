// One element of an activation, for both devices. `Exp` is the device's exp.
#pragma once

#include "core/dtype.h"
#include "layers/activation.h"

namespace rowshard {

template <Activation kActivation, typename A, typename Exp>
struct ActivationElement {
  static constexpr bool kSilu = kActivation == Activation::kSwiGlu;
  static constexpr A kTwoRootTwoOverPi = static_cast<A>(1.5957691216057307117597842397375);
  static constexpr A kCubic = static_cast<A>(0.044715);

  /// g · σ(z(g))
  ROWSHARD_HD static A forward(A g) { return g / (1 + Exp{}(-inner(g))); }
  /// Its value; its slope is s · tail, in the order in which a gradient is multiplied by them.
  ROWSHARD_HD static A backward(A g, A& s, A& tail) {
    s = 1 / (1 + Exp{}(-inner(g)));
    tail = 1 + g * (1 - s);
    if constexpr (!kSilu)
      tail = 1 + g * (1 - s) * (kTwoRootTwoOverPi * (1 + 3 * kCubic * g * g));
    return g * s;
  }

 private:
  ROWSHARD_HD static A inner(A g) {
    return kSilu ? g : kTwoRootTwoOverPi * (g + kCubic * g * g * g);
  }
};

}  // namespace rowshard
