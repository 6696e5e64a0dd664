#include "layers/quantized_input.h"

#include "fp8/quantize.h"

namespace rowshard {

QuantizedActivation allocate_rowwise(Shape shape, Grouping grouping, Category category,
                                     const char* name, Context& ctx) {
  QuantizedActivation result;
  result.grouping = grouping;
  result.codes = ctx.arena.tensor(category, name, DType::kE4M3, shape);
  result.scales = ctx.arena.tensor(category, name, scale_dtype(grouping),
                                   gemm_scale_shape(grouping, shape[0], shape[1]));
  return result;
}

void quantize_activation(QuantizedActivation& into, const ConstView& x, Usage copies,
                         Category category, const char* name, Context& ctx) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const Usage missing{copies.rowwise && !into.codes, copies.columnwise && !into.columnwise_codes};
  if (rows == 0 || missing == Usage{})
    return;
  if (missing.rowwise) {
    QuantizedActivation rowwise = allocate_rowwise(x.shape, into.grouping, category, name, ctx);
    into.codes = std::move(rowwise.codes);
    into.scales = std::move(rowwise.scales);
  }
  const Fp8View rowwise = into.rowwise();
  if (!missing.columnwise) {
    quantize(&rowwise, nullptr, x, {}, ctx.stream);
    return;
  }
  const int64_t padded = round_up(rows, QuantizedActivation::kRowStep);
  into.columnwise_codes = ctx.arena.tensor(category, name, DType::kE4M3, {cols, padded});
  into.columnwise_scales = ctx.arena.tensor(category, name, scale_dtype(into.grouping),
                                            gemm_scale_shape(into.grouping, cols, padded));
  const Fp8View columnwise = into.columnwise();
  if (padded == rows) {
    quantize(missing.rowwise ? &rowwise : nullptr, &columnwise, x, {}, ctx.stream);
    return;
  }
  const Tensor whole =
      ctx.arena.tensor(Category::kWorkspace, "linear.padded", x.dtype, {padded, cols});
  copy(whole.view().slice_rows(0, rows), x, ctx.stream);
  fill_bytes(whole.view().slice_rows(rows, padded - rows), 0, ctx.stream);
  if (missing.rowwise)
    quantize(&rowwise, nullptr, x, {}, ctx.stream);
  quantize(nullptr, &columnwise, whole, {}, ctx.stream);
}

}  // namespace rowshard
