#include "fp8/formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"

namespace rowshard {
namespace {

// Values of the format definitions, written without the code under test.
double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}
double e5m2_value(int code) {
  const int exponent = code >> 2 & 31, mantissa = code & 3;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -16) : std::ldexp(4 + mantissa, exponent - 17);
  return code & 0x80 ? -magnitude : magnitude;
}

TEST(Formats, DecodeFollowsTheDefinition) {
  for (int code = 0; code < 256; ++code) {
    const float e4m3 = decode_e4m3(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(e4m3)) << code;
    } else {
      EXPECT_EQ(e4m3, e4m3_value(code)) << code;
      EXPECT_EQ(std::signbit(e4m3), code >= 128) << code;
    }
    const float e5m2 = decode_e5m2(static_cast<uint8_t>(code));
    if ((code & 0x7f) > 0x7c) {
      EXPECT_TRUE(std::isnan(e5m2)) << code;
    } else if ((code & 0x7f) == 0x7c) {
      EXPECT_TRUE(std::isinf(e5m2)) << code;
    } else {
      EXPECT_EQ(e5m2, e5m2_value(code)) << code;
    }
  }
  EXPECT_EQ(decode_e4m3(0x7e), fp8_max(Fp8Format::kE4M3));
  EXPECT_EQ(decode_e5m2(0x7b), fp8_max(Fp8Format::kE5M2));
}

template <typename Encode, typename Value>
void check_rounding(Encode encode, Value value, int largest_code) {
  for (int code = 0; code < largest_code; ++code) {
    const float low = static_cast<float>(value(code)), high = static_cast<float>(value(code + 1));
    const float middle = (low + high) / 2;  // exact: one more bit than the format
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(encode(low), code);
    EXPECT_EQ(encode(-low), code | 0x80);
    EXPECT_EQ(encode(middle), even);
    EXPECT_EQ(encode(std::nextafter(middle, low)), code);
    EXPECT_EQ(encode(std::nextafter(middle, high)), code + 1);
    EXPECT_EQ(encode(-std::nextafter(middle, high)), (code + 1) | 0x80);
  }
  const float inf = std::numeric_limits<float>::infinity();
  const float largest = static_cast<float>(value(largest_code));
  for (float above : {largest, largest * 1.01f, largest * 2, 3e38f, inf}) {
    EXPECT_EQ(encode(above), largest_code) << above;
    EXPECT_EQ(encode(-above), largest_code | 0x80) << above;
  }
  EXPECT_EQ(encode(std::numeric_limits<float>::quiet_NaN()), 0x7f);
  EXPECT_EQ(encode(-std::numeric_limits<float>::quiet_NaN()), 0x7f);
  EXPECT_EQ(encode(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(encode(-0.0f), 0x80);
}

TEST(Formats, EncodeRoundsToNearestEvenAndSaturates) {
  check_rounding(encode_e4m3, e4m3_value, 0x7e);
  check_rounding(encode_e5m2, e5m2_value, 0x7b);
}

TEST(Formats, E8M0RoundsUp) {
  for (int code = 1; code < 254; ++code) {
    const float power = std::ldexp(1.0f, code - 127);
    EXPECT_EQ(decode_e8m0(static_cast<uint8_t>(code)), power);
    EXPECT_EQ(encode_e8m0_up(power), code);
    EXPECT_EQ(encode_e8m0_up(std::nextafter(power, 0.0f)), code);
    EXPECT_EQ(encode_e8m0_up(std::nextafter(power, 3e38f)), code + 1);
    EXPECT_EQ(mx_multiplier(static_cast<uint8_t>(code)) * power, 1.0f);
  }
  EXPECT_EQ(decode_e8m0(0), 0x1p-127f);
  EXPECT_EQ(mx_multiplier(0), 0x1p127f);
  EXPECT_EQ(mx_multiplier(254), 0x1p-127f);
  EXPECT_TRUE(std::isnan(mx_multiplier(255)));
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
  EXPECT_EQ(encode_e8m0_up(0), 0);
  EXPECT_EQ(encode_e8m0_up(0x1p-127f), 0);
  EXPECT_EQ(encode_e8m0_up(std::nextafter(0x1p-127f, 1.0f)), 1);
  EXPECT_EQ(encode_e8m0_up(std::numeric_limits<float>::max()), 0xfe);
  EXPECT_EQ(encode_e8m0_up(std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(encode_e8m0_up(std::numeric_limits<float>::quiet_NaN()), 0xff);
  // An exact maximum must not spill into the next power of two.
  EXPECT_EQ(mx_scale_code(448.0f, 448.0f), 127);
  EXPECT_EQ(mx_scale_code(57344.0f, 57344.0f), 127);
}

TEST(Formats, BlockScaleTable) {
  const float inf = std::numeric_limits<float>::infinity();
  const float f32 = largest_finite(DType::kF32);
  struct Case {
    float amax;
    bool power_of_two;
    float epsilon, largest_input, multiplier, scale;
  };
  const Case cases[] = {
      {0, true, 0, f32, 1, 1},
      {0, false, 0, f32, 1, 1},
      {1, true, 0, f32, 256, 0x1p-8f},
      {1, false, 0, f32, 448, 1.0f / 448},
      {448, true, 0, f32, 1, 1},
      {448.5f, true, 0, f32, 0.5f, 2},
      {1e-40f, true, 0, f32, 0x1p127f, 0x1p-127f},
      {1e-40f, true, 0, largest_finite(DType::kBF16), 0x1p127f, 0x1p-127f},
      {1e-40f, false, 0, f32, f32, 1.0f / f32},
      {1e-40f, true, 0, 65504, 0x1p15f, 0x1p-15f},
      {inf, true, 0, f32, 1, 1},
      {inf, false, 0, f32, 1, 1},
      {1e-3f, true, 1.0f, f32, 256, 0x1p-8f},
      {0, true, 1.0f, f32, 256, 0x1p-8f},
  };
  for (const Case& c : cases) {
    const BlockScale got = block_scale(c.amax, 448.0f, c.power_of_two, c.epsilon, c.largest_input);
    EXPECT_EQ(got.multiplier, c.multiplier) << c.amax;
    EXPECT_EQ(got.scale, c.scale) << c.amax;
    EXPECT_NE(got.scale, 0) << "a subnormal scale was flushed";
  }
}

TEST(Formats, DtypesBothWays) {
  EXPECT_EQ(format_of(dtype_of(Fp8Format::kE5M2)), Fp8Format::kE5M2);
  EXPECT_EQ(format_of(DType::kE4M3), Fp8Format::kE4M3);
  EXPECT_THROW(format_of(DType::kE8M0), ShapeError);
  EXPECT_EQ(decode_table(Fp8Format::kE5M2)[0x3c], 1.0f);
  EXPECT_EQ(decode_table(Fp8Format::kE4M3)[0x38], 1.0f);
}

}  // namespace
}  // namespace rowshard
