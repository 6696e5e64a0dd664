// A quantised matrix [rows N, cols K] and the state of its two copies.
//
// The rowwise copy is owned or bound (memory of a caller, such as a gathered unit); the columnwise
// copy is owned. Every write of rowwise bytes raises the version, and a columnwise copy made from
// an older version is stale: it can never be read, and counts as absent.
//
// A copy that is missing can be made
//   from the other copy, when blocks are square (128×128, MX 32×32): exact, both ways;
//   from a source, when one is set: the high-precision values or a checkpoint.
// A copy that could not be made again is not dropped by update_usage; `discard` does it knowingly.
//
// update_usage validates first and then changes: a request that throws UsageError changed nothing.
// Work is queued on ctx.stream. On cuda a dropped copy's bytes go back to the arena at once, for
// use on the same stream. Not thread-safe.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/arena.h"
#include "fp8/quantize.h"
#include "fp8/rebuild.h"

namespace rowshard {

/// Which copies a step needs, or a matrix has.
struct Usage {
  bool rowwise = false;
  bool columnwise = false;
  bool operator==(const Usage&) const = default;
};
std::string to_string(Usage usage);  // "{rowwise, columnwise}", "{}", …

/// Names the matrix, its state, the request, and what to do.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// What a caller says about rowwise bytes it binds.
enum class Contents {
  kNew,        // the columnwise copy of before is stale
  kUnchanged,  // the same values as the last time, e.g. the frozen unit gathered once more
};

class Fp8Matrix {
 public:
  /// Writes the asked copies (null: not asked) from values of higher precision.
  using Source =
      std::function<void(const Fp8View* rowwise, const Fp8View* columnwise, Context& ctx)>;

  Fp8Matrix(std::string name, int64_t rows, int64_t cols, Grouping grouping, Device device);
  Fp8Matrix(Fp8Matrix&&) noexcept = default;
  Fp8Matrix& operator=(Fp8Matrix&&) noexcept = default;

  const std::string& name() const { return name_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  Grouping grouping() const { return grouping_; }
  Device device() const { return device_; }
  /// Of the copies; e4m3 until the first copy is there.
  Fp8Format format() const { return format_; }
  /// Raised by every write of rowwise values.
  uint64_t version() const { return version_; }

  // -- putting copies in place. Shapes, dtypes and device are checked (ShapeError).
  /// codes [N, K], scales gemm_scale_shape(N, K): the caller's memory, alive until unbind_rowwise.
  void bind_rowwise(const View& codes, const View& scales, Contents contents = Contents::kNew);
  /// The caller takes its memory back (reshard). No-op without the copy; LogicError when it is
  /// owned.
  void unbind_rowwise();
  /// The columnwise copy of a matrix whose two copies are sharded apart (MX): codes [K, N], the
  /// caller's memory, alive until unbind_columnwise, of the same values as the rowwise copy.
  void bind_columnwise(const View& codes, const View& scales);
  void unbind_columnwise();
  void own_rowwise(Tensor codes, Tensor scales);
  /// codes [K, N], scales gemm_scale_shape(K, N); taken to hold the same values as the rowwise
  /// copy.
  void own_columnwise(Tensor codes, Tensor scales);
  /// The rowwise bytes were written in place: the columnwise copy is stale from here on.
  void rowwise_written();
  /// Quantises x [N, K] into the rowwise copy and, when asked for, the columnwise one, by one
  /// kernel, in the memory they have or in new memory of ctx.arena. A columnwise copy that is not
  /// asked for is stale from here on. options.skip is read on the device: then both keep what they
  /// held.
  void quantize_from(const ConstView& x, Usage copies, const QuantizeOptions& options,
                     Context& ctx);
  void set_source(Source source) { source_ = std::move(source); }
  bool has_source() const { return static_cast<bool>(source_); }

  // -- reading
  /// The copies that exist and are not stale.
  Usage usage() const;
  bool rowwise_is_bound() const { return rowwise_ && !rowwise_->owned; }
  /// UsageError when the copy is absent or stale.
  ConstFp8View rowwise() const;
  ConstFp8View columnwise() const;
  /// For writing in place; call rowwise_written afterwards.
  Fp8View mutable_rowwise();
  /// Bytes of the copies that exist in memory, stale ones included.
  int64_t rowwise_bytes() const;
  int64_t columnwise_bytes() const;

  // -- changing which copies exist
  /// true: make it if it is missing; false: drop it; nullopt: leave it as it is. Asking for neither
  /// copy is refused. New codes are allocated as `columnwise` or `rowwise_shard`, scales as
  /// `scales`. `start` is of a rebuild of the columnwise copy.
  void update_usage(std::optional<bool> rowwise, std::optional<bool> columnwise, Context& ctx,
                    RebuildStart start = RebuildStart::kInOrder);
  /// A recorded graph reads the columnwise copy: until it is unpinned it is not dropped, and a
  /// request to drop it is a UsageError. The columnwise copy must be there.
  void pin_columnwise(bool pinned);
  bool columnwise_pinned() const { return pinned_; }
  /// Drops the named copies whether or not they can be made again; the matrix may end up empty.
  void discard(Usage copies);
  /// Every copy that is there and not stale, in memory of `arena`, owned; codes and scales bit for
  /// bit. `stream` is of the cuda device when either side is cuda; synchronise before reading.
  Fp8Matrix copy_to(Arena& arena, Stream& stream) const;

 private:
  struct Copy {
    Tensor codes, scales;  // empty when bound
    Fp8View view;
    bool owned = false;
    uint64_t version = 0;  // of the rowwise values it holds
  };

  bool has_rowwise() const { return rowwise_.has_value(); }
  bool has_columnwise() const { return columnwise_ && columnwise_->version == version_; }
  bool can_remake(Usage keeping, bool rowwise) const;
  std::string describe_state() const;
  void check_copy(const View& codes, const View& scales, bool rowwise);
  Copy make_copy(bool rowwise, Context& ctx) const;

  std::string name_;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  Grouping grouping_ = Grouping::k128x128;
  Device device_;
  Fp8Format format_ = Fp8Format::kE4M3;
  uint64_t version_ = 0;
  std::optional<Copy> rowwise_;
  std::optional<Copy> columnwise_;
  Source source_;
  bool pinned_ = false;
};

}  // namespace rowshard
