#include "layers/weight.h"

#include "fp8/quantize.h"
#include "layers/dispatch.h"

namespace rowshard {

void check_weight(const char* operation, const LinearWeight& weight) {
  const Fp8Matrix* fp8 = weight.quantized();
  const Shape shape{weight.n, weight.k};
  const bool plain_fits = weight.plain.data != nullptr && weight.plain.shape == shape;
  ROWSHARD_CHECK(
      fp8 ? fp8->rows() == weight.n && fp8->cols() == weight.k : plain_fits, ShapeError, operation,
      ": ", weight.name, " is declared ", shape, " but holds ",
      fp8 ? message("fp8 [", fp8->rows(), ", ", fp8->cols(), "]") : describe(weight.plain));
  ROWSHARD_CHECK(!(weight.workspace && weight.fp8) && (!weight.workspace || plain_fits), ShapeError,
                 operation, ": ", weight.name,
                 " has an FP8 workspace and so needs its master values as `plain` ", shape,
                 ", and no `fp8`; got ", describe(weight.plain));
  ROWSHARD_CHECK(!weight.gradient.data || weight.gradient.shape == shape, ShapeError, operation,
                 ": the gradient of ", weight.name, " must be ", shape, "; got ",
                 describe(weight.gradient));
  ROWSHARD_CHECK(!weight.bias_gradient.data || weight.bias_gradient.shape == Shape{weight.n},
                 ShapeError, operation, ": the bias gradient of ", weight.name, " must be [",
                 weight.n, "]; got ", describe(weight.bias_gradient));
}

void refresh_workspace(const LinearWeight& weight, Usage copies, Context& ctx) {
  Fp8Workspace* workspace = weight.workspace;
  if (!workspace)
    return;
  Fp8Matrix& matrix = workspace->matrix;
  const Usage have = matrix.usage();
  if (!ctx.stream.capturing()) {
    if (workspace->version == weight.version && have.rowwise)
      return;
    matrix.quantize_from(weight.plain, {true, copies.columnwise || have.columnwise}, {}, ctx);
    workspace->version = weight.version;
    return;
  }
  ROWSHARD_CHECK(have.rowwise && (have.columnwise || !copies.columnwise), UsageError, weight.name,
                 ": its FP8 workspace has ", to_string(have), " and a graph being recorded needs ",
                 to_string(copies),
                 ". Run one step before the capture, so that every copy is there");
  ROWSHARD_CHECK(
      workspace->unchanged, UsageError, weight.name,
      ": whether its FP8 workspace must be quantised again is decided by the host, which "
      "does not run at a replay. Give Fp8Workspace::unchanged, a flag on the device");
  QuantizeOptions options;
  options.skip = workspace->unchanged;
  matrix.quantize_from(weight.plain, {true, have.columnwise}, options, ctx);
}

}  // namespace rowshard
