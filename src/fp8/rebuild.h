// The other copy of a matrix whose blocks are square (128×128, MX 32×32): bytes and scales
// transposed, bit for bit what quantising directly gives. Also the way back, so a rowwise copy can
// be made from a columnwise one.
//
// Work is queued on `stream` and may be captured. Throws ShapeError when shapes do not fit, and for
// 1×128 and MX 1×32, whose groups differ between the copies: there the way is through the
// high-precision values.
#pragma once

#include "fp8/fp8_view.h"

namespace rowshard {

/// When the rebuild may start on cuda.
enum class RebuildStart {
  kInOrder,  // after everything queued before it
  /// Beside the operation queued just before it on the stream, a 1×128 quantisation that neither
  /// writes what is read here nor touches what is written; after everything before that one. What
  /// is queued next still comes after both. Not behind any other kernel: our products let others
  /// start beside them too, and may still read what is written here.
  kBesideQuantizer,
};

///   columnwise  [K, N], written, scale padding included
///   rowwise     [N, K]
void rebuild_columnwise(const Fp8View& columnwise, const ConstFp8View& rowwise, Stream& stream,
                        RebuildStart start = RebuildStart::kInOrder);

}  // namespace rowshard
