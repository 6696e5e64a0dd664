// The arena owns every byte the library allocates on one device, by category and name.
//
// A Buffer (or Tensor) is an owning, move-only handle; destroying it returns its bytes. Freed
// blocks are kept and handed out again for the same size, so a step that repeats allocates nothing
// and sees the same addresses. On cuda a returned block may be handed out at once: work still
// queued on it must be on, or ordered before, the stream of its next user.
//
// `now`, `peak` and `steady` count the bytes asked for by live buffers, not what is cached. A
// destroyed arena with live buffers is a LogicError in the making: buffers keep its state alive, so
// their accounting stays valid.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/view.h"

namespace rowshard {

enum class Category {
  kRowwiseShard,   // the owned rowwise bytes of this rank
  kGathered,       // gathered units, transient
  kColumnwise,     // columnwise copies, transient unless the policy is `resident`
  kScales,         // scales of owned and gathered copies
  kActivations,    // what forward saves and what layers pass on
  kAdapter,        // adapter factors and their gradients
  kOptimizer,      // optimiser state
  kWorkspace,      // GEMM workspace and scratch
  kCommunication,  // staging and flat buckets
};
inline constexpr int kCategoryCount = 9;
const char* to_string(Category category);  // "rowwise_shard", …: the words of plan and metrics

struct CategoryBytes {
  int64_t now = 0;
  int64_t peak = 0;    // highest `now` since construction or reset_peak
  int64_t steady = 0;  // `now` at the last mark_steady
};

class Arena;

/// Owning handle of one allocation.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }
  void reset();

 private:
  friend class Arena;
  std::shared_ptr<void> arena_;  // keeps the arena's state
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  uint64_t id_ = 0;
};

/// A Buffer with a shape: an owning View.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Buffer buffer, View view) : buffer_(std::move(buffer)), view_(view) {}
  Tensor(Tensor&& other) noexcept
      : buffer_(std::move(other.buffer_)), view_(std::exchange(other.view_, View{})) {}
  Tensor& operator=(Tensor&& other) noexcept {
    buffer_ = std::move(other.buffer_);
    view_ = std::exchange(other.view_, View{});
    return *this;
  }

  const View& view() const { return view_; }
  operator const View&() const { return view_; }           // NOLINT
  operator ConstView() const { return ConstView(view_); }  // NOLINT
  template <typename T>
  T* as() const {
    return view_.as<T>();
  }
  const Shape& shape() const { return view_.shape; }
  DType dtype() const { return view_.dtype; }
  explicit operator bool() const { return static_cast<bool>(buffer_); }
  void reset() {
    buffer_.reset();
    view_ = View{};
  }

 private:
  Buffer buffer_;
  View view_;
};

class Arena {
 public:
  explicit Arena(Device device);

  Device device() const;

  /// `bytes` of memory aligned to 256 bytes, never null for bytes > 0. Contents are undefined
  /// (poisoned with 0xff, a NaN in every float format, when `set_poison(true)`). Throws DeviceError
  /// with the table of live bytes when the device is out of memory.
  Buffer allocate(Category category, std::string_view name, int64_t bytes);
  Tensor tensor(Category category, std::string_view name, DType dtype, Shape shape);

  CategoryBytes bytes(Category category) const;
  CategoryBytes total() const;
  void mark_steady();
  void reset_peak();

  /// Names and bytes of live allocations of a category, largest first.
  std::vector<std::pair<std::string, int64_t>> live(Category category) const;
  /// A table "category now steady peak" for people.
  std::string table() const;

  /// Fills every new block with 0xff before handing it out; for tests. Blocking, so not on cuda
  /// while an ArenaRecording lives.
  void set_poison(bool poison);
  /// Returns cached blocks to the system, but for those of recorded graphs.
  void trim();

 private:
  friend class Buffer;
  friend class ArenaRecording;
  struct State;
  std::shared_ptr<State> state_;
};

/// While it lives, blocks come from a set that the arena keeps for recorded graphs, and go back to
/// it whenever they are freed. Nothing else is served from there, and the set stays until the arena
/// is gone, so that a graph recorded meanwhile finds its addresses for itself at every replay.
/// Graphs that are replayed one after another on one stream share it. At most one at a time.
class ArenaRecording {
 public:
  explicit ArenaRecording(Arena& arena);
  ~ArenaRecording();
  ArenaRecording(const ArenaRecording&) = delete;
  ArenaRecording& operator=(const ArenaRecording&) = delete;

 private:
  std::shared_ptr<Arena::State> state_;
};

/// What an operation needs besides its operands: where scratch comes from and where work is queued.
struct Context {
  Arena& arena;
  Stream& stream;

  Device device() const { return stream.device(); }
};

}  // namespace rowshard
