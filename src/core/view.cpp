#include "core/view.h"

#include <cstring>

#if ROWSHARD_CUDA
#include "core/cuda_check.h"
#endif

namespace rowshard {

Shape::Shape(std::initializer_list<int64_t> dims) {
  ROWSHARD_CHECK(dims.size() <= dims_.size(), ShapeError, "a shape has at most 4 dimensions");
  for (int64_t dim : dims) {
    ROWSHARD_CHECK(dim >= 0, ShapeError, "a dimension of ", dim);
    dims_[rank_++] = dim;
  }
}

int64_t Shape::elements() const {
  int64_t product = 1;
  for (int i = 0; i < rank_; ++i)
    product *= dims_[i];
  return product;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int i = 0; i < shape.rank(); ++i)
    out << (i ? ", " : "") << shape[i];
  return out << ']';
}

void detail::check_element_type(DType wanted, DType got) {
  ROWSHARD_CHECK(wanted == got, ShapeError, "a view of ", to_string(got), " read as ",
                 to_string(wanted));
}

std::string describe(const ConstView& view) {
  return message(to_string(view.dtype), " ", view.shape, " on ", view.device);
}

namespace {

template <typename V>
V slice_rows_of(const V& view, int64_t begin, int64_t count) {
  ROWSHARD_CHECK(
      view.shape.rank() >= 1 && begin >= 0 && count >= 0 && begin + count <= view.shape[0],
      ShapeError, "rows ", begin, " to ", begin + count, " of ", describe(view));
  const int64_t row = view.shape[0] == 0 ? 0 : view.bytes() / view.shape[0];
  Shape shape;
  switch (view.shape.rank()) {
    case 1:
      shape = Shape{count};
      break;
    case 2:
      shape = Shape{count, view.shape[1]};
      break;
    case 3:
      shape = Shape{count, view.shape[1], view.shape[2]};
      break;
    default:
      shape = Shape{count, view.shape[1], view.shape[2], view.shape[3]};
  }
  return V(view.byte_data() + begin * row, view.dtype, shape, view.device);
}

template <typename V>
V reshape_of(const V& view, Shape shape) {
  ROWSHARD_CHECK(shape.elements() == view.elements(), ShapeError, describe(view),
                 " cannot be seen as ", shape);
  return V(view.data, view.dtype, shape, view.device);
}

}  // namespace

View View::slice_rows(int64_t begin, int64_t count) const {
  return slice_rows_of(*this, begin, count);
}
View View::reshape(Shape shape_) const {
  return reshape_of(*this, shape_);
}
ConstView ConstView::slice_rows(int64_t begin, int64_t count) const {
  return slice_rows_of(*this, begin, count);
}
ConstView ConstView::reshape(Shape shape_) const {
  return reshape_of(*this, shape_);
}

void copy(const View& destination, const ConstView& source, Stream& stream) {
  ROWSHARD_CHECK(destination.dtype == source.dtype && destination.elements() == source.elements(),
                 ShapeError, "copy from ", describe(source), " to ", describe(destination));
  if (source.bytes() == 0 || destination.device.is_plan() || source.device.is_plan())
    return;
#if ROWSHARD_CUDA
  if (destination.device.is_cuda() || source.device.is_cuda()) {
    CUDA_CHECK(cudaMemcpyAsync(destination.data, source.data, source.bytes(), cudaMemcpyDefault,
                               native(stream)));
    return;
  }
#endif
  (void)stream;
  std::memmove(destination.data, source.data, source.bytes());
}

void fill_bytes(const View& destination, uint8_t value, Stream& stream) {
  if (destination.bytes() == 0 || destination.device.is_plan())
    return;
#if ROWSHARD_CUDA
  if (destination.device.is_cuda()) {
    CUDA_CHECK(cudaMemsetAsync(destination.data, value, destination.bytes(), native(stream)));
    return;
  }
#endif
  (void)stream;
  std::memset(destination.data, value, destination.bytes());
}

}  // namespace rowshard
