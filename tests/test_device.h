// The device under test, and small helpers that every test of both devices needs.
#pragma once

#include <vector>

#include "core/arena.h"

namespace rowshard::testing {

extern Device test_device;

/// Arena (poisoned) and stream on a device, with upload and download.
struct Bench {
  Arena arena;
  Stream stream;
  Context ctx{arena, stream};

  explicit Bench(Device device = test_device) : arena(device), stream(device) {
    arena.set_poison(true);
  }

  template <typename T>
  Tensor upload(const std::vector<T>& values, Shape shape,
                Category category = Category::kActivations) {
    Tensor tensor = arena.tensor(category, "test", DTypeOf<T>::value, shape);
    copy(tensor, ConstView(values.data(), DTypeOf<T>::value, shape, kHost), stream);
    stream.synchronize();
    return tensor;
  }
  /// The bytes as they lie, as elements of T (any T of the right size, e.g. uint8_t for codes).
  template <typename T>
  std::vector<T> download(const ConstView& view) {
    std::vector<T> values(view.bytes() / sizeof(T));
    copy(View(values.data(), view.dtype, view.shape, kHost), view, stream);
    stream.synchronize();
    return values;
  }
};

}  // namespace rowshard::testing
