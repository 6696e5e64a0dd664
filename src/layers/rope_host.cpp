#include <cmath>
#include <numbers>
#include <vector>

#include "layers/dispatch.h"
#include "layers/rope.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void rope(const View& x, const ConstView& positions, const RopeTable& table,
          RopeDirection direction, Stream& stream);
}
#endif

namespace {

double scaled_frequency(double frequency, const Llama3RopeScaling& s) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength < s.original_max_position / s.high_freq_factor)
    return frequency;
  if (wavelength > s.original_max_position / s.low_freq_factor)
    return frequency / s.factor;
  const double smooth = (s.original_max_position / wavelength - s.low_freq_factor) /
                        (s.high_freq_factor - s.low_freq_factor);
  return (1 - smooth) * frequency / s.factor + smooth * frequency;
}

}  // namespace

RopeTable::RopeTable(int64_t head_dim, int64_t max_position, double theta,
                     const std::optional<Llama3RopeScaling>& scaling, Context& ctx) {
  ROWSHARD_CHECK(head_dim > 0 && head_dim % 2 == 0 && max_position > 0 && theta > 0, ConfigError,
                 "RoPE needs an even head_dim > 0, max_position > 0 and theta > 0; got head_dim ",
                 head_dim, ", max_position ", max_position, ", theta ", theta);
  ROWSHARD_CHECK(!scaling || (scaling->factor > 0 && scaling->original_max_position > 0 &&
                              scaling->low_freq_factor > 0 &&
                              scaling->high_freq_factor > scaling->low_freq_factor),
                 ConfigError,
                 "llama3 RoPE scaling needs factor > 0 and 0 < low_freq_factor < high_freq_factor");
  const int64_t half = head_dim / 2;
  std::vector<float> cosines(max_position * half), sines(max_position * half);
  for (int64_t i = 0; i < half; ++i) {
    double frequency =
        std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    if (scaling)
      frequency = scaled_frequency(frequency, *scaling);
    for (int64_t position = 0; position < max_position; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      cosines[position * half + i] = static_cast<float>(std::cos(angle));
      sines[position * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  const Shape shape{max_position, half};
  cos = ctx.arena.tensor(Category::kActivations, "rope.cos", DType::kF32, shape);
  sin = ctx.arena.tensor(Category::kActivations, "rope.sin", DType::kF32, shape);
  copy(cos, ConstView(cosines.data(), DType::kF32, shape, kHost), ctx.stream);
  copy(sin, ConstView(sines.data(), DType::kF32, shape, kHost), ctx.stream);
}

namespace host {
namespace {

template <typename T>
void rotate(T* x, const int32_t* positions, const float* cosines, const float* sines,
            int64_t tokens, int64_t heads, int64_t head_dim, Accumulator<T> sign) {
  using A = Accumulator<T>;
  const int64_t half = head_dim / 2;
#pragma omp parallel for if (tokens * heads * head_dim > kParallelElements)
  for (int64_t token = 0; token < tokens; ++token) {
    const float* c = cosines + positions[token] * half;
    const float* s = sines + positions[token] * half;
    for (int64_t head = 0; head < heads; ++head) {
      T* low = x + (token * heads + head) * head_dim;
      T* high = low + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const A a = widen(low[i]), b = widen(high[i]);
        const A cosine = c[i], sine = sign * static_cast<A>(s[i]);
        low[i] = narrow<T>(a * cosine - b * sine);
        high[i] = narrow<T>(b * cosine + a * sine);
      }
    }
  }
}

}  // namespace

void rope(const View& x, const ConstView& positions, const RopeTable& table,
          RopeDirection direction, Stream&) {
  const int32_t* p = positions.as<int32_t>();
  for (int64_t t = 0; t < x.dim(0); ++t) {
    ROWSHARD_CHECK(p[t] >= 0 && p[t] < table.max_position(), ShapeError, "rope: position ", p[t],
                   " of token ", t, " is outside the table of ", table.max_position(),
                   " positions; shorten the sequence or enlarge max_position");
  }
  for_host_type(x.dtype, "rope", [&](auto type) {
    using T = decltype(type);
    rotate<T>(x.as<T>(), p, table.cos.as<float>(), table.sin.as<float>(), x.dim(0), x.dim(1),
              x.dim(2), direction == RopeDirection::kForward ? 1 : -1);
  });
}

}  // namespace host

void rope(const View& x, const ConstView& positions, const RopeTable& table,
          RopeDirection direction, Stream& stream) {
  check_operands(x.shape.rank() == 3 && is_float_dtype(x.dtype) &&
                     positions.shape == Shape{x.dim(0)} && positions.dtype == DType::kI32 &&
                     positions.device == x.device && table.head_dim() == x.dim(2) &&
                     table.cos.view().device == x.device,
                 "rope", "x [T, heads, D], positions [T] i32, table [max_position, D/2]",
                 {{"x", x}, {"positions", positions}, {"table", table.cos}});
  if (x.elements() == 0)
    return;
  ROWSHARD_DISPATCH(x.device, rope(x, positions, table, direction, stream));
}

}  // namespace rowshard
