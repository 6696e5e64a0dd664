// Non-owning views of contiguous row-major memory: pointer, dtype, shape, device.
//
// A View may be written through, a ConstView not. Neither owns nor extends a lifetime.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <ostream>

#include "core/device.h"
#include "core/dtype.h"

namespace rowshard {

/// Up to four dimensions, the last one contiguous.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[i]; }
  int64_t elements() const;
  bool operator==(const Shape&) const = default;

 private:
  std::array<int64_t, 4> dims_{};
  int rank_ = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);  // [a, b]

namespace detail {

template <typename Void, typename Byte>
struct BasicView {
  Void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  Device device;

  int64_t elements() const { return shape.elements(); }
  int64_t bytes() const { return elements() * size_of(dtype); }
  int64_t dim(int i) const { return shape[i]; }
  /// The last dimension, and the product of all others: how a matrix kernel sees any tensor.
  int64_t cols() const { return shape.rank() == 0 ? 1 : shape[shape.rank() - 1]; }
  int64_t rows() const { return cols() == 0 ? 0 : elements() / cols(); }
  Byte* byte_data() const { return static_cast<Byte*>(data); }
};

void check_element_type(DType wanted, DType got);

}  // namespace detail

struct View : detail::BasicView<void, std::byte> {
  View() = default;
  View(void* data_, DType dtype_, Shape shape_, Device device_) {
    data = data_;
    dtype = dtype_;
    shape = shape_;
    device = device_;
  }
  /// Typed pointer; throws ShapeError when T is not the dtype.
  template <typename T>
  T* as() const {
    detail::check_element_type(DTypeOf<T>::value, dtype);
    return static_cast<T*>(data);
  }
  View slice_rows(int64_t begin, int64_t count) const;  // along dimension 0
  View reshape(Shape shape) const;                      // same number of elements
};

struct ConstView : detail::BasicView<const void, const std::byte> {
  ConstView() = default;
  ConstView(const void* data_, DType dtype_, Shape shape_, Device device_) {
    data = data_;
    dtype = dtype_;
    shape = shape_;
    device = device_;
  }
  ConstView(const View& view)  // NOLINT: reading is always allowed
      : ConstView(view.data, view.dtype, view.shape, view.device) {}
  template <typename T>
  const T* as() const {
    detail::check_element_type(DTypeOf<T>::value, dtype);
    return static_cast<const T*>(data);
  }
  ConstView slice_rows(int64_t begin, int64_t count) const;
  ConstView reshape(Shape shape) const;
};

/// "bf16 [4, 8] on host", for messages.
std::string describe(const ConstView& view);

/// Copies bytes between any two devices, ordered on `stream`; shapes and dtypes must agree. A copy
/// from pageable host memory to cuda has left the source when it returns.
void copy(const View& destination, const ConstView& source, Stream& stream);
/// Sets every byte.
void fill_bytes(const View& destination, uint8_t value, Stream& stream);
/// Converts between f64, f32, f16 and bf16 (round to nearest even), element by element, on one
/// device.
void convert(const View& destination, const ConstView& source, Stream& stream);

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

}  // namespace rowshard
