#include "core/dtype.h"

#include "core/error.h"

namespace rowshard {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kE8M0:
    case DType::kU8:
      return 1;
  }
  throw LogicError("size_of: unknown dtype");
}

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "f64";
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kE4M3:
      return "e4m3";
    case DType::kE5M2:
      return "e5m2";
    case DType::kE8M0:
      return "e8m0";
    case DType::kU8:
      return "u8";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
  }
  return "?";
}

}  // namespace rowshard
