#include "fp8/dgrad_rowwise.h"

#include "core/cuda_check.h"
#include "fp8/gemm_1d2d.h"
#include "fp8/gemm_path.h"

namespace rowshard::cuda {

void fp8_dgrad_rowwise(const View& dx, const ConstFp8View& dy, const ConstFp8View& w, float beta,
                       Context& ctx) {
  for (const void* pointer : {static_cast<const void*>(dx.data), dy.codes.data, dy.scales.data,
                              w.codes.data, w.scales.data}) {
    ROWSHARD_CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, ShapeError,
                   "fp8_dgrad_rowwise on cuda needs 16-byte aligned operands: dx ", describe(dx),
                   ", dy ", describe(dy), ", w ", describe(w));
  }
  Gemm1d2d product;
  product.x = dy.codes.data;
  product.x_scales = dy.scales.as<float>();
  product.w = w.codes.data;
  product.w_scales = w.scales.as<float>();
  product.transpose_w = true;
  product.y = dx.data;
  product.y_is_f32 = dx.dtype == DType::kF32;
  product.beta = beta;
  product.m = dx.dim(0);
  product.n = w.inner();
  product.k = w.outer();
  gemm_1d2d(product, product_multiprocessors(multiprocessor_count(ctx.device())),
            ctx.stream.native());
}

}  // namespace rowshard::cuda
