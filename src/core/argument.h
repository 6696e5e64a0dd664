// A number that a kernel takes: fixed when the work is queued, or read where it lies when the work
// runs, so that each replay of a recorded graph (core/graph.h) sees what is there then.
#pragma once

#include "core/dtype.h"

namespace rowshard {

template <typename T>
struct Argument {
  T value{};
  const T* from = nullptr;  // borrowed, on the device that reads it; null: `value`

  Argument(T fixed) : value(fixed) {}  // NOLINT: a number is an argument
  static Argument at(const T* from) {
    Argument argument{T{}};
    argument.from = from;
    return argument;
  }
  ROWSHARD_HD T get() const { return from ? *from : value; }
};

}  // namespace rowshard
