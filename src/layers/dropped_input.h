// x as an adapter's first factor reads it, for the sources of this room.
#pragma once

#include "layers/lora.h"

namespace rowshard {

/// x with the mask on it: x itself at rate 0, else a copy in workspace that lives as long as this.
struct DroppedInput {
  Tensor scratch;
  ConstView view;

  DroppedInput(const ConstView& x, const Dropout& dropout, Context& ctx) : view(x) {
    if (dropout.rate == 0)
      return;
    scratch = ctx.arena.tensor(Category::kWorkspace, "lora.dropped", x.dtype, x.shape);
    apply_dropout(scratch, x, dropout, ctx.stream);
    view = scratch;
  }
};

}  // namespace rowshard
