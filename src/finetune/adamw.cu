#include "finetune/adamw.h"

#include <algorithm>
#include <cstdint>

#include "core/cuda_check.h"
#include "finetune/adamw_element.h"

namespace rowshard::cuda {
namespace {

struct Pointers {
  float* p;
  const float* g;
  float* m;
  float* v;
  bf16* compute;                // may be null
  const float* gradient_scale;  // may be null
};

__device__ void update(const AdamWConstants& c, const Pointers& x, float scale, int64_t i) {
  float p = x.p[i], m = x.m[i], v = x.v[i];
  adamw_element(c, x.g[i] * scale, p, m, v);
  x.p[i] = p;
  x.m[i] = m;
  x.v[i] = v;
  if (x.compute)
    x.compute[i] = bf16(p);
}

// Four elements a thread and turn in 16-byte accesses when every pointer allows it: 16 bytes in,
// 12 out a parameter, so memory is all that counts.
__global__ void adamw_kernel(Argument<AdamWConstants> constants, Pointers x, int64_t n,
                             bool aligned) {
  const float scale = x.gradient_scale ? *x.gradient_scale : 1.0f;
  if (!isfinite(scale))
    return;
  const AdamWConstants c = constants.get();
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t stride = int64_t{blockDim.x} * gridDim.x;
  const int64_t quads = aligned ? n / 4 : 0;
  for (int64_t i = thread; i < quads; i += stride) {
    float4 p = reinterpret_cast<float4*>(x.p)[i];
    float4 m = reinterpret_cast<float4*>(x.m)[i];
    float4 v = reinterpret_cast<float4*>(x.v)[i];
    const float4 g = reinterpret_cast<const float4*>(x.g)[i];
    adamw_element(c, g.x * scale, p.x, m.x, v.x);
    adamw_element(c, g.y * scale, p.y, m.y, v.y);
    adamw_element(c, g.z * scale, p.z, m.z, v.z);
    adamw_element(c, g.w * scale, p.w, m.w, v.w);
    reinterpret_cast<float4*>(x.p)[i] = p;
    reinterpret_cast<float4*>(x.m)[i] = m;
    reinterpret_cast<float4*>(x.v)[i] = v;
    if (x.compute) {
      reinterpret_cast<ushort4*>(x.compute)[i] =
          make_ushort4(bf16(p.x).bits, bf16(p.y).bits, bf16(p.z).bits, bf16(p.w).bits);
    }
  }
  for (int64_t i = quads * 4 + thread; i < n; i += stride)
    update(c, x, scale, i);
}

}  // namespace

void adamw(const AdamWVectors& vectors, Argument<AdamWConstants> constants, Stream& stream) {
  const int64_t n = vectors.parameters.elements();
  const Pointers x{
      .p = vectors.parameters.as<float>(),
      .g = vectors.gradients.as<float>(),
      .m = vectors.m.as<float>(),
      .v = vectors.v.as<float>(),
      .compute = vectors.compute.data ? vectors.compute.as<bf16>() : nullptr,
      .gradient_scale = vectors.gradient_scale.data ? vectors.gradient_scale.as<float>() : nullptr};
  const auto on = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  const bool aligned = on(x.p, 16) && on(x.g, 16) && on(x.m, 16) && on(x.v, 16) && on(x.compute, 8);
  const int64_t threads = aligned ? ceil_div(n, 4) : n;
  const int blocks = static_cast<int>(
      std::min<int64_t>(ceil_div(threads, 256), 8 * multiprocessor_count(stream.device())));
  adamw_kernel<<<blocks, 256, 0, native(stream)>>>(constants, x, n, aligned);
  CUDA_CHECK_LAUNCH("adamw");
}

}  // namespace rowshard::cuda
