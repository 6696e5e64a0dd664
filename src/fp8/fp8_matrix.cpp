#include "fp8/fp8_matrix.h"

#include "core/trace.h"

namespace rowshard {

std::string to_string(Usage usage) {
  if (usage.rowwise && usage.columnwise) {
    return "{rowwise, columnwise}";
  }
  return usage.rowwise ? "{rowwise}" : usage.columnwise ? "{columnwise}" : "{}";
}

namespace {

const char* to_string(std::optional<bool> wanted) {
  return wanted ? (*wanted ? "true" : "false") : "unchanged";
}
const char* name_of(bool rowwise) {
  return rowwise ? "rowwise" : "columnwise";
}

}  // namespace

Fp8Matrix::Fp8Matrix(std::string name, int64_t rows, int64_t cols, Grouping grouping, Device device)
    : name_(std::move(name)), rows_(rows), cols_(cols), grouping_(grouping), device_(device) {}

void Fp8Matrix::check_copy(const View& codes, const View& scales, bool rowwise) {
  const Fp8View view{codes, scales, grouping_};
  check(ConstFp8View(view), name_.c_str());
  const Shape wanted = rowwise ? Shape{rows_, cols_} : Shape{cols_, rows_};
  ROWSHARD_CHECK(codes.shape == wanted && codes.device == device_, ShapeError, name_, ": the ",
                 name_of(rowwise), " copy must be codes ", wanted, " on ", device_, "; got ",
                 describe(ConstFp8View(view)));
  const Fp8Format format = format_of(codes.dtype);
  const bool alone = rowwise ? !columnwise_ : !rowwise_;
  ROWSHARD_CHECK(alone || format == format_, ShapeError, name_, ": the ", name_of(rowwise),
                 " copy is ", to_string(format), " and the other ", to_string(format_));
  format_ = format;
}

void Fp8Matrix::bind_rowwise(const View& codes, const View& scales, Contents contents) {
  ROWSHARD_CHECK(!rowwise_ || !rowwise_->owned, LogicError, name_,
                 ": bind_rowwise over an owned rowwise copy would free it; discard it first");
  check_copy(codes, scales, true);
  version_ += contents == Contents::kNew ? 1 : 0;
  rowwise_ = Copy{{}, {}, {codes, scales, grouping_}, false, version_};
}

void Fp8Matrix::unbind_rowwise() {
  ROWSHARD_CHECK(!rowwise_ || !rowwise_->owned, LogicError, name_,
                 ": unbind_rowwise of an owned copy; use update_usage or discard");
  rowwise_.reset();
}

void Fp8Matrix::bind_columnwise(const View& codes, const View& scales) {
  ROWSHARD_CHECK(!columnwise_ || !columnwise_->owned, LogicError, name_,
                 ": bind_columnwise over an owned columnwise copy would free it; discard it first");
  check_copy(codes, scales, false);
  columnwise_ = Copy{{}, {}, {codes, scales, grouping_}, false, version_};
}

void Fp8Matrix::unbind_columnwise() {
  ROWSHARD_CHECK(!columnwise_ || !columnwise_->owned, LogicError, name_,
                 ": unbind_columnwise of an owned copy; use update_usage or discard");
  columnwise_.reset();
}

void Fp8Matrix::own_rowwise(Tensor codes, Tensor scales) {
  check_copy(codes, scales, true);
  const Fp8View view{codes, scales, grouping_};
  rowwise_ = Copy{std::move(codes), std::move(scales), view, true, ++version_};
}

void Fp8Matrix::own_columnwise(Tensor codes, Tensor scales) {
  check_copy(codes, scales, false);
  const Fp8View view{codes, scales, grouping_};
  columnwise_ = Copy{std::move(codes), std::move(scales), view, true, version_};
}

void Fp8Matrix::rowwise_written() {
  ROWSHARD_CHECK(rowwise_, LogicError, name_, ": rowwise_written without a rowwise copy");
  rowwise_->version = ++version_;
}

void Fp8Matrix::quantize_from(const ConstView& x, Usage copies, const QuantizeOptions& options,
                              Context& ctx) {
  ROWSHARD_CHECK(
      copies.rowwise, UsageError, describe_state(),
      "; quantize_from makes the rowwise copy, alone or with the columnwise one; asked for ",
      rowshard::to_string(copies));
  ROWSHARD_CHECK(x.shape == (Shape{rows_, cols_}) && x.device == device_ && ctx.device() == device_,
                 ShapeError, name_, ": quantize_from takes [", rows_, ", ", cols_, "] on ", device_,
                 "; got ", describe(x), ", stream on ", ctx.device());
  ROWSHARD_CHECK((!rowwise_ && !columnwise_) || options.format == format_, ShapeError, name_,
                 ": its copies are ", to_string(format_), ", asked for ",
                 to_string(options.format));
  format_ = options.format;
  std::optional<Copy> new_rowwise, new_columnwise;
  if (!rowwise_)
    new_rowwise = make_copy(true, ctx);
  if (copies.columnwise && !columnwise_)
    new_columnwise = make_copy(false, ctx);
  const Fp8View& rowwise = rowwise_ ? rowwise_->view : new_rowwise->view;
  const Fp8View* columnwise = !copies.columnwise ? nullptr
                              : columnwise_      ? &columnwise_->view
                                                 : &new_columnwise->view;
  quantize(&rowwise, columnwise, x, options, ctx.stream);
  ++version_;
  if (new_rowwise)
    rowwise_ = std::move(new_rowwise);
  rowwise_->version = version_;
  if (!copies.columnwise)
    return;
  if (new_columnwise)
    columnwise_ = std::move(new_columnwise);
  columnwise_->version = version_;
}

void Fp8Matrix::pin_columnwise(bool pinned) {
  ROWSHARD_CHECK(!pinned || has_columnwise(), UsageError, describe_state(),
                 "; its columnwise copy cannot be pinned before it is there");
  pinned_ = pinned;
}

Usage Fp8Matrix::usage() const {
  return {has_rowwise(), has_columnwise()};
}

std::string Fp8Matrix::describe_state() const {
  std::string state = message(name_, " [", rows_, ", ", cols_, "] ", to_string(grouping_), " has ",
                              rowshard::to_string(usage()));
  if (columnwise_ && !has_columnwise()) {
    state += message(" and a stale columnwise copy (made from version ", columnwise_->version,
                     ", rowwise is at ", version_, ")");
  }
  return state;
}

ConstFp8View Fp8Matrix::rowwise() const {
  ROWSHARD_CHECK(has_rowwise(), UsageError, describe_state(),
                 "; its rowwise copy was read. Gather the unit first, or ask for it with "
                 "update_usage(true, …)");
  return rowwise_->view;
}

ConstFp8View Fp8Matrix::columnwise() const {
  ROWSHARD_CHECK(has_columnwise(), UsageError, describe_state(),
                 "; its columnwise copy was read. Ask for it with update_usage(…, true) before "
                 "the product that reads it");
  return columnwise_->view;
}

Fp8View Fp8Matrix::mutable_rowwise() {
  static_cast<void>(rowwise());
  return rowwise_->view;
}

int64_t Fp8Matrix::rowwise_bytes() const {
  return rowwise_ ? rowwise_->view.codes.bytes() + rowwise_->view.scales.bytes() : 0;
}

int64_t Fp8Matrix::columnwise_bytes() const {
  return columnwise_ ? columnwise_->view.codes.bytes() + columnwise_->view.scales.bytes() : 0;
}

/// Whether the copy could be made while only `keeping` exist.
bool Fp8Matrix::can_remake(Usage keeping, bool rowwise) const {
  const bool other = rowwise ? keeping.columnwise : keeping.rowwise;
  return has_source() || (other && rebuildable(grouping_));
}

Fp8Matrix::Copy Fp8Matrix::make_copy(bool rowwise, Context& ctx) const {
  const int64_t outer = rowwise ? rows_ : cols_, inner = rowwise ? cols_ : rows_;
  const std::string copy_name = name_ + "." + name_of(rowwise);
  Copy copy;
  copy.codes = ctx.arena.tensor(rowwise ? Category::kRowwiseShard : Category::kColumnwise,
                                copy_name, dtype_of(format_), {outer, inner});
  copy.scales = ctx.arena.tensor(Category::kScales, copy_name + ".scales", scale_dtype(grouping_),
                                 gemm_scale_shape(grouping_, outer, inner));
  copy.view = {copy.codes, copy.scales, grouping_};
  copy.owned = true;
  return copy;
}

void Fp8Matrix::update_usage(std::optional<bool> rowwise, std::optional<bool> columnwise,
                             Context& ctx, RebuildStart start) {
  if (!rowwise && !columnwise) {
    return;
  }
  const Usage have = usage();
  const Usage want{rowwise.value_or(have.rowwise), columnwise.value_or(have.columnwise)};
  const auto refused = [&](const auto&... why) {
    return message(describe_state(), "; update_usage(rowwise ", to_string(rowwise), ", columnwise ",
                   to_string(columnwise), ") refused: ", why...);
  };
  ROWSHARD_CHECK(want.rowwise || want.columnwise, UsageError,
                 refused("neither copy would be left. Keep one, or call discard"));
  ROWSHARD_CHECK(ctx.device() == device_, UsageError,
                 refused("the matrix is on ", device_, ", the stream on ", ctx.device()));
  ROWSHARD_CHECK(
      !pinned_ || want.columnwise, UsageError,
      refused("a recorded graph reads the columnwise copy. Unpin it (pin_columnwise(false)) "
              "once that graph is gone"));
  for (const bool is_rowwise : {true, false}) {
    const bool has = is_rowwise ? have.rowwise : have.columnwise;
    const bool wants = is_rowwise ? want.rowwise : want.columnwise;
    const bool bound = is_rowwise && rowwise_is_bound();  // dropping it destroys nothing
    ROWSHARD_CHECK(
        !wants || has || can_remake(have, is_rowwise), UsageError,
        refused("the ", name_of(is_rowwise), " copy is missing and ",
                rebuildable(grouping_) ? "there is no copy to rebuild it from. Gather or load one"
                                       : "groups of one row cannot be rebuilt from the other copy",
                ". Quantise it from the high-precision weights or load it (own_",
                name_of(is_rowwise), "), or declare where it comes from (set_source)"));
    ROWSHARD_CHECK(
        wants || !has || bound || can_remake(want, is_rowwise), UsageError,
        refused("the ", name_of(is_rowwise),
                " copy could not be made again. Set a source first (set_source), keep it "
                "(leave it unchanged), or drop it for good with discard"));
  }

  // From here on only the device can fail; state changes after it did not.
  std::optional<Copy> new_rowwise, new_columnwise;
  const bool make_rowwise = want.rowwise && !have.rowwise;
  const bool make_columnwise = want.columnwise && !have.columnwise;
  if (make_rowwise) {
    new_rowwise = make_copy(true, ctx);
  }
  // A stale copy's memory is written again, so that its address stays for a captured graph.
  Fp8View columnwise_view;
  if (make_columnwise) {
    if (!columnwise_) {
      new_columnwise = make_copy(false, ctx);
    }
    columnwise_view = columnwise_ ? columnwise_->view : new_columnwise->view;
  }
  if (make_columnwise && have.rowwise && rebuildable(grouping_)) {
    const TraceSpan span(ctx.stream, TraceLane::kCompute, "rebuild",
                         2 * columnwise_view.codes.bytes());
    rebuild_columnwise(columnwise_view, rowwise_->view, ctx.stream, start);
  } else if (make_rowwise && have.columnwise && rebuildable(grouping_)) {
    rebuild_columnwise(new_rowwise->view, columnwise_->view, ctx.stream);
  } else if (make_rowwise || make_columnwise) {
    source_(make_rowwise ? &new_rowwise->view : nullptr,
            make_columnwise ? &columnwise_view : nullptr, ctx);
  }
  if (new_rowwise) {
    rowwise_ = std::move(new_rowwise);
    rowwise_->version = version_;
  }
  if (new_columnwise) {
    columnwise_ = std::move(new_columnwise);
  }
  if (make_columnwise) {
    columnwise_->version = version_;
  }
  if (!want.rowwise) {
    rowwise_.reset();
  }
  if (!want.columnwise && columnwise) {
    columnwise_.reset();
  }
}

void Fp8Matrix::discard(Usage copies) {
  if (copies.rowwise) {
    rowwise_.reset();
  }
  if (copies.columnwise) {
    columnwise_.reset();
    pinned_ = false;
  }
}

Fp8Matrix Fp8Matrix::copy_to(Arena& arena, Stream& stream) const {
  Fp8Matrix result(name_, rows_, cols_, grouping_, arena.device());
  result.format_ = format_;
  result.version_ = version_;
  Context ctx{arena, stream};
  for (const bool is_rowwise : {true, false}) {
    if (is_rowwise ? has_rowwise() : has_columnwise()) {
      const Copy& from = is_rowwise ? *rowwise_ : *columnwise_;
      Copy to = make_copy(is_rowwise, ctx);
      copy(to.view.codes, from.view.codes, stream);
      copy(to.view.scales, from.view.scales, stream);
      to.version = version_;
      (is_rowwise ? result.rowwise_ : result.columnwise_) = std::move(to);
    }
  }
  return result;
}

}  // namespace rowshard
