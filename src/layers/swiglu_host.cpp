#include "layers/dispatch.h"
#include "layers/host_math.h"
#include "layers/swiglu.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void swiglu(const View& y, const ConstView& gate, const ConstView& up, Stream& stream);
void swiglu_backward(const View& dgate, const View& dup, const ConstView& dy, const ConstView& gate,
                     const ConstView& up, Stream& stream);
}  // namespace cuda
#endif

namespace host {

void swiglu(const View& y, const ConstView& gate, const ConstView& up, Stream&) {
  for_host_type(y.dtype, "swiglu", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    T* out = y.as<T>();
    const T* g = gate.as<T>();
    const T* u = up.as<T>();
    const int64_t count = y.elements();
#pragma omp parallel for simd if (parallel : count > kParallelElements)
    for (int64_t i = 0; i < count; ++i) {
      const A value = widen(g[i]);
      out[i] = narrow<T>(value / (1 + fast_exp(-value)) * widen(u[i]));
    }
  });
}

void swiglu_backward(const View& dgate, const View& dup, const ConstView& dy, const ConstView& gate,
                     const ConstView& up, Stream&) {
  for_host_type(dy.dtype, "swiglu_backward", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    T* dg = dgate.as<T>();
    T* du = dup.as<T>();
    const T* grad = dy.as<T>();
    const T* g = gate.as<T>();
    const T* u = up.as<T>();
    const int64_t count = dy.elements();
#pragma omp parallel for simd if (parallel : count > kParallelElements)
    for (int64_t i = 0; i < count; ++i) {
      const A value = widen(g[i]), factor = widen(u[i]), d = widen(grad[i]);
      const A s = 1 / (1 + fast_exp(-value));
      dg[i] = narrow<T>(d * factor * s * (1 + value * (1 - s)));
      du[i] = narrow<T>(d * (value * s));
    }
  });
}

}  // namespace host

void swiglu(const View& y, const ConstView& gate, const ConstView& up, Stream& stream) {
  check_operands(same_operands(y, {gate, up}), "swiglu", "y, gate and up alike",
                 {{"y", y}, {"gate", gate}, {"up", up}});
  if (y.elements() == 0)
    return;
  ROWSHARD_DISPATCH(y.device, swiglu(y, gate, up, stream));
}

void swiglu_backward(const View& dgate, const View& dup, const ConstView& dy, const ConstView& gate,
                     const ConstView& up, Stream& stream) {
  check_operands(same_operands(dy, {dgate, dup, gate, up}), "swiglu_backward", "all operands alike",
                 {{"dgate", dgate}, {"dup", dup}, {"dy", dy}, {"gate", gate}, {"up", up}});
  if (dy.elements() == 0)
    return;
  ROWSHARD_DISPATCH(dy.device, swiglu_backward(dgate, dup, dy, gate, up, stream));
}

}  // namespace rowshard
