#include "core/view.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void convert(const View& destination, const ConstView& source, Stream& stream);
}
#endif

namespace host {
namespace {

template <typename To, typename From>
void convert_elements(const View& destination, const ConstView& source) {
  To* to = destination.as<To>();
  const From* from = source.as<From>();
  const int64_t count = source.elements();
#pragma omp parallel for if (count > 65536)
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<To, double> || std::is_same_v<From, double>) {
      // bf16 and f16 go through float; f64 -> bf16 rounds twice, which only tests do.
      if constexpr (std::is_same_v<To, double>) {
        to[i] = static_cast<double>(widen(from[i]));
      } else {
        to[i] = static_cast<To>(static_cast<float>(from[i]));
      }
    } else {
      to[i] = static_cast<To>(static_cast<float>(from[i]));
    }
  }
}

template <typename To>
void convert_from(const View& destination, const ConstView& source) {
  switch (source.dtype) {
    case DType::kF64:
      return convert_elements<To, double>(destination, source);
    case DType::kF32:
      return convert_elements<To, float>(destination, source);
    case DType::kF16:
      return convert_elements<To, f16>(destination, source);
    case DType::kBF16:
      return convert_elements<To, bf16>(destination, source);
    default:
      throw ShapeError(message("convert: no float conversion from ", to_string(source.dtype)));
  }
}

}  // namespace

void convert(const View& destination, const ConstView& source, Stream&) {
  switch (destination.dtype) {
    case DType::kF64:
      return convert_from<double>(destination, source);
    case DType::kF32:
      return convert_from<float>(destination, source);
    case DType::kF16:
      return convert_from<f16>(destination, source);
    case DType::kBF16:
      return convert_from<bf16>(destination, source);
    default:
      throw ShapeError(message("convert: no float conversion to ", to_string(destination.dtype)));
  }
}

}  // namespace host

void convert(const View& destination, const ConstView& source, Stream& stream) {
  ROWSHARD_CHECK(destination.elements() == source.elements() && destination.device == source.device,
                 ShapeError, "convert ", describe(source), " to ", describe(destination));
  if (source.dtype == destination.dtype)
    return copy(destination, source, stream);
  if (source.elements() == 0)
    return;
  ROWSHARD_DISPATCH(stream.device(), convert(destination, source, stream));
}

}  // namespace rowshard
