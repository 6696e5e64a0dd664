#include <cstring>

#include "layers/dispatch.h"
#include "layers/embedding.h"

namespace rowshard {

#if ROWSHARD_CUDA
namespace cuda {
void embedding_lookup_part(const View& y, const ConstView& table, int64_t first, int64_t vocabulary,
                           const ConstView& ids, Stream& stream);
}
#endif

void check_ids(std::span<const int32_t> ids, int64_t vocabulary) {
  for (size_t i = 0; i < ids.size(); ++i) {
    ROWSHARD_CHECK(ids[i] >= 0 && ids[i] < vocabulary, ShapeError, "token id ", ids[i],
                   " at place ", i, " is outside the vocabulary of ", vocabulary,
                   "; data and model must come from the same tokenizer");
  }
}

namespace host {

void embedding_lookup_part(const View& y, const ConstView& table, int64_t first, int64_t vocabulary,
                           const ConstView& ids, Stream& stream) {
  const int32_t* id = ids.as<int32_t>();
  const int64_t tokens = y.dim(0);
  check_ids({id, static_cast<size_t>(tokens)}, vocabulary);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = id[t] - first;
    if (row >= 0 && row < table.dim(0)) {
      convert(y.slice_rows(t, 1), table.slice_rows(row, 1), stream);
    } else {
      fill_bytes(y.slice_rows(t, 1), 0, stream);
    }
  }
}

}  // namespace host

void embedding_lookup(const View& y, const ConstView& table, const ConstView& ids, Stream& stream) {
  embedding_lookup_part(y, table, 0, table.dim(0), ids, stream);
}

void embedding_lookup_part(const View& y, const ConstView& table, int64_t first, int64_t vocabulary,
                           const ConstView& ids, Stream& stream) {
  check_operands(
      y.shape.rank() == 2 && table.shape.rank() == 2 && is_float_dtype(table.dtype) &&
          y.dim(1) == table.dim(1) && ids.shape == Shape{y.dim(0)} && ids.dtype == DType::kI32 &&
          (y.dtype == table.dtype || (y.dtype == DType::kF32 && table.dtype == DType::kBF16)) &&
          y.device == table.device && y.device == ids.device && first >= 0 &&
          first + table.dim(0) <= vocabulary,
      "embedding_lookup", "y [T, H], table [V, H], ids [T] i32",
      {{"y", y}, {"table", table}, {"ids", ids}});
  if (y.elements() == 0)
    return;
  ROWSHARD_DISPATCH(y.device, embedding_lookup_part(y, table, first, vocabulary, ids, stream));
}

}  // namespace rowshard
