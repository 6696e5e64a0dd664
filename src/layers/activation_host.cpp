#include <vector>

#include "layers/activation_element.h"
#include "layers/dispatch.h"
#include "layers/host_math.h"
#include "layers/host_quantize.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void activation_forward(const View& y, const Fp8View* y8, const ConstView& gate,
                        const ConstView& up, Activation activation, Stream& stream);
void activation_backward(const View& dgate, const View& dup, const ConstView& dy,
                         const ConstView& gate, const ConstView& up, Activation activation,
                         Stream& stream);
}  // namespace cuda
#endif

const char* to_string(Activation activation) {
  switch (activation) {
    case Activation::kSwiGlu:
      return "swiglu";
    case Activation::kGeGlu:
      return "geglu";
    case Activation::kGelu:
      return "gelu";
  }
  return "?";
}

namespace host {
namespace {

struct Exp {
  template <typename A>
  A operator()(A x) const {
    return fast_exp(x);
  }
};

/// f(std::integral_constant of the activation).
template <typename F>
void for_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kSwiGlu:
      return f(std::integral_constant<Activation, Activation::kSwiGlu>{});
    case Activation::kGeGlu:
      return f(std::integral_constant<Activation, Activation::kGeGlu>{});
    case Activation::kGelu:
      return f(std::integral_constant<Activation, Activation::kGelu>{});
  }
}

template <Activation kActivation, typename T>
void forward_row(T* out, const T* g, const T* u, int64_t width) {
  using A = Accumulator<T>;
  using Element = ActivationElement<kActivation, A, Exp>;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const A value = Element::forward(widen(g[i]));
    if constexpr (is_gated(kActivation)) {
      out[i] = narrow<T>(value * widen(u[i]));
    } else {
      out[i] = narrow<T>(value);
    }
  }
}

template <Activation kActivation, typename T>
void forward(const View& y, const Fp8View* y8, const ConstView& gate, const ConstView& up) {
  const int64_t rows = gate.rows(), width = gate.cols();
#pragma omp parallel if (rows * width > kParallelElements)
  {
    std::vector<T> scratch(y.data ? 0 : width);
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * width;
      T* out = y.data ? y.as<T>() + at : scratch.data();
      forward_row<kActivation>(out, gate.as<T>() + at, up.data ? up.as<T>() + at : nullptr, width);
      if constexpr (!std::is_same_v<T, double>) {
        if (y8)
          quantize_row(*y8, row, out);
      }
    }
  }
}

template <Activation kActivation, typename T>
void backward(const View& dgate, const View& dup, const ConstView& dy, const ConstView& gate,
              const ConstView& up) {
  using A = Accumulator<T>;
  using Element = ActivationElement<kActivation, A, Exp>;
  constexpr bool kGated = is_gated(kActivation);
  T* dg = dgate.as<T>();
  T* du = kGated ? dup.as<T>() : nullptr;
  const T* grad = dy.as<T>();
  const T* g = gate.as<T>();
  const T* u = kGated ? up.as<T>() : nullptr;
  const int64_t count = dy.elements();
#pragma omp parallel for simd if (parallel : count > kParallelElements)
  for (int64_t i = 0; i < count; ++i) {
    const A d = widen(grad[i]);
    A s, tail;
    const A value = Element::backward(widen(g[i]), s, tail);
    if constexpr (kGated) {
      dg[i] = narrow<T>(d * widen(u[i]) * s * tail);
      du[i] = narrow<T>(d * value);
    } else {
      dg[i] = narrow<T>(d * s * tail);
    }
  }
}

}  // namespace

void activation_forward(const View& y, const Fp8View* y8, const ConstView& gate,
                        const ConstView& up, Activation activation, Stream&) {
  for_activation(activation, [&](auto kind) {
    for_host_type(gate.dtype, "activation_forward", [&](auto type) {
      forward<decltype(kind)::value, decltype(type)>(y, y8, gate, up);
    });
  });
}

void activation_backward(const View& dgate, const View& dup, const ConstView& dy,
                         const ConstView& gate, const ConstView& up, Activation activation,
                         Stream&) {
  for_activation(activation, [&](auto kind) {
    for_host_type(dy.dtype, "activation_backward", [&](auto type) {
      backward<decltype(kind)::value, decltype(type)>(dgate, dup, dy, gate, up);
    });
  });
}

}  // namespace host

namespace {

/// Present and like `first` when the activation is gated, absent when not.
bool second_fits(const ConstView& first, const ConstView& second, Activation activation) {
  return is_gated(activation) ? same_operands(first, {second}) : second.data == nullptr;
}

}  // namespace

void activation_forward(const View& y, const Fp8View* y8, const ConstView& gate,
                        const ConstView& up, Activation activation, Stream& stream) {
  check_operands(is_float_dtype(gate.dtype) && second_fits(gate, up, activation) &&
                     (y.data == nullptr || same_operands(gate, {y})),
                 to_string(activation), "y, gate and (when gated) up alike",
                 {{"y", y}, {"gate", gate}, {"up", up}});
  check_fused_codes(to_string(activation), y8, gate);
  ROWSHARD_CHECK(y.data || y8 || gate.elements() == 0, LogicError, to_string(activation),
                 ": neither y nor its codes were asked for");
  if (gate.elements() == 0)
    return;
  ROWSHARD_DISPATCH(gate.device, activation_forward(y, y8, gate, up, activation, stream));
}

void activation_backward(const View& dgate, const View& dup, const ConstView& dy,
                         const ConstView& gate, const ConstView& up, Activation activation,
                         Stream& stream) {
  check_operands(same_operands(dy, {dgate, gate}) && second_fits(dy, up, activation) &&
                     second_fits(dy, dup, activation),
                 to_string(activation), "dgate, dy, gate and (when gated) dup, up alike",
                 {{"dgate", dgate}, {"dup", dup}, {"dy", dy}, {"gate", gate}, {"up", up}});
  if (dy.elements() == 0)
    return;
  ROWSHARD_DISPATCH(dy.device, activation_backward(dgate, dup, dy, gate, up, activation, stream));
}

}  // namespace rowshard
