#include "fp8/formats.h"

#include <array>

#include "core/error.h"

namespace rowshard {

DType dtype_of(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? DType::kE4M3 : DType::kE5M2;
}

Fp8Format format_of(DType dtype) {
  ROWSHARD_CHECK(dtype == DType::kE4M3 || dtype == DType::kE5M2, ShapeError,
                 "codes must be e4m3 or e5m2; got ", to_string(dtype));
  return dtype == DType::kE4M3 ? Fp8Format::kE4M3 : Fp8Format::kE5M2;
}

const char* to_string(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? "e4m3" : "e5m2";
}

const float* decode_table(Fp8Format format) {
  static const auto tables = [] {
    std::array<std::array<float, 256>, 2> values;
    for (int code = 0; code < 256; ++code) {
      values[0][code] = decode_e4m3(static_cast<uint8_t>(code));
      values[1][code] = decode_e5m2(static_cast<uint8_t>(code));
    }
    return values;
  }();
  return tables[format == Fp8Format::kE4M3 ? 0 : 1].data();
}

}  // namespace rowshard
