#include "layers/dispatch.h"
#include "layers/tensor_parallel.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void sum_parts(const View& y, std::span<const ConstView> parts, const ConstView& bias,
               Stream& stream);
}
#endif

namespace host {

void sum_parts(const View& y, std::span<const ConstView> parts, const ConstView& bias, Stream&) {
  const int64_t count = y.elements(), width = y.cols();
  const auto run = [&](auto to, auto from) {
    using T = decltype(to);
    using P = decltype(from);
    using A = Accumulator<P>;
    T* out = y.as<T>();
    const T* shift = bias.data ? bias.as<T>() : nullptr;
#pragma omp parallel for if (count > kParallelElements)
    for (int64_t i = 0; i < count; ++i) {
      A sum = widen(parts[0].as<P>()[i]);
      for (size_t part = 1; part < parts.size(); ++part)
        sum += widen(parts[part].as<P>()[i]);
      if (shift)
        sum += static_cast<A>(widen(shift[i % width]));
      out[i] = static_cast<T>(sum);
    }
  };
  for_host_type(y.dtype, "sum_parts", [&](auto to) {
    if (parts[0].dtype == y.dtype) {
      run(to, to);
    } else {
      run(to, float{});
    }
  });
}

}  // namespace host

void sum_parts(const View& y, std::span<const ConstView> parts, const ConstView& bias,
               Stream& stream) {
  ROWSHARD_CHECK(!parts.empty() && parts.size() <= kMostParts, LogicError, "sum_parts of ",
                 parts.size(), " parts; 1 to ", kMostParts);
  bool fit = is_float_dtype(y.dtype) && y.shape.rank() == 2;
  for (const ConstView& part : parts) {
    fit = fit && part.shape == y.shape && part.device == y.device && part.dtype == parts[0].dtype &&
          (part.dtype == y.dtype || (part.dtype == DType::kF32 && y.dtype == DType::kBF16));
  }
  fit = fit && (!bias.data || (bias.shape == Shape{y.dim(1)} && bias.dtype == y.dtype &&
                               bias.device == y.device));
  check_operands(fit, "sum_parts", "y [n, H], parts like y or f32, bias [H] like y",
                 {{"y", y}, {"first part", parts[0]}, {"bias", bias}});
  if (y.elements() == 0)
    return;
  ROWSHARD_DISPATCH(y.device, sum_parts(y, parts, bias, stream));
}

}  // namespace rowshard
