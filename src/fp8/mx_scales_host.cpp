#include "core/error.h"
#include "fp8/mx_scales.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void swizzle_mx_scales(const View& y, const ConstFp8View& x, Stream& stream);
}
#endif

Shape swizzled_scale_shape(int64_t outer, int64_t inner) {
  return {round_up(outer, 128), round_up(ceil_div(inner, 32), 4)};
}

namespace host {
namespace {

void swizzle_mx_scales(const View& y, const ConstFp8View& x, Stream& stream) {
  fill_bytes(y, 0, stream);
  auto* to = y.as<uint8_t>();
  const auto* from = static_cast<const uint8_t*>(x.scales.data);
  const int64_t groups = x.scales.dim(1), tiles_in_a_row = y.dim(1) / 4;
  for (int64_t row = 0; row < x.outer(); ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t tile = row / 128 * tiles_in_a_row + group / 4, r = row % 128;
      to[tile * 512 + r % 32 * 16 + r / 32 * 4 + group % 4] =
          from[row / outer_block(x.grouping) * groups + group];
    }
  }
}

}  // namespace
}  // namespace host

void swizzle_mx_scales(const View& y, const ConstFp8View& x, Stream& stream) {
  check(x, "swizzle_mx_scales");
  const Shape wanted = swizzled_scale_shape(x.outer(), x.inner());
  ROWSHARD_CHECK(is_mx(x.grouping) && y.dtype == DType::kU8 && y.shape == wanted &&
                     y.device == x.codes.device && stream.device() == y.device,
                 ShapeError, "swizzle_mx_scales: from ", describe(x), " to ", describe(y),
                 " on a stream of ", stream.device(), "; wanted MX scales and u8 ", wanted);
  if (y.elements() == 0)
    return;
  ROWSHARD_DISPATCH(stream.device(), swizzle_mx_scales(y, x, stream));
}

}  // namespace rowshard
