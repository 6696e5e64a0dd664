// Collectives over a fixed group of ranks on one device.
//
// Make one communicator for each purpose (gather, reduce, tp); all ranks issue the collectives of
// all communicators in one order. Operands live on `device()`. Buffers belong to the collective
// until the stream has passed it. Every call checks its operands first and throws ShapeError naming
// the communicator; a failed or late peer is a CommError or CommTimeout.
//
// Stream semantics. cuda: queued on the stream, capturable (NCCL; not staged). Host: started at
// once and left pending on the stream, and finished by whoever waits for an event recorded after
// it, so a forgotten wait shows on the host too. On a stream named "compute" (the default name,
// where host operations run when they are issued) it is finished before the call returns, so that,
// as on cuda, the next operation on that stream may read the result.
//
// Reductions on the host, and staged, sum in rank order, bf16 and f16 in fp32 with one rounding:
// the result is the same on every rank and in every run. NCCL's order is its own, identical on all
// ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/watchdog.h"
#include "core/view.h"

namespace rowshard {

enum class Reduction { kSum, kMax, kMin };
const char* to_string(Reduction reduction);

struct ByteRange {
  int64_t begin = 0, end = 0;
};

/// This rank's part of something gathered many times, whose bytes do not change: Communicator::fix.
class FixedPart {
 public:
  FixedPart(const ConstView& part, std::vector<ByteRange> own)
      : part_(part), own_(std::move(own)) {}
  virtual ~FixedPart() = default;
  FixedPart(const FixedPart&) = delete;
  FixedPart& operator=(const FixedPart&) = delete;
  const ConstView& part() const { return part_; }
  const std::vector<ByteRange>& own() const { return own_; }

 private:
  ConstView part_;
  std::vector<ByteRange> own_;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }  // in this group
  int size() const { return static_cast<int>(members_.size()); }
  const std::string& name() const { return name_; }
  const std::vector<int>& members() const { return members_; }  // ranks of the world, by group rank
  Device device() const { return device_; }

  /// out = every rank's `in` in rank order; equal parts, out.elements() = size * in.elements(), any
  /// dtype. `in` may be this rank's own slice of `out`.
  void all_gather(const View& out, const ConstView& in, Stream& stream);
  /// Promises that `part`, of one size and dtype on all ranks, lies where it is and holds the bytes
  /// it will hold after the next barrier for as long as the handle lives. Collective, and so is the
  /// handle's end, which first waits for the peers' gathers of it. With that promise a gather needs
  /// neither a rendezvous nor a kernel: over the peer transport it is copies out of the peers'
  /// memory, where all ranks share a machine and can read it; elsewhere it is all_gather.
  ///
  /// `own`: the bytes of this rank's own part that its gathers must deliver too, the others being
  /// read where they lie; what is not in it is undefined in the result, and costs no copy where
  /// that can be. Ranks may differ.
  std::unique_ptr<FixedPart> fix(const ConstView& part, std::vector<ByteRange> own);
  std::unique_ptr<FixedPart> fix(const ConstView& part) { return fix(part, {{0, part.bytes()}}); }
  /// all_gather of fixed parts; `part` is this communicator's.
  void all_gather(const View& out, const FixedPart& part, Stream& stream);
  /// The same with `counts[r]` elements from rank r; parts may be empty.
  void all_gather_v(const View& out, const ConstView& in, std::span<const int64_t> counts,
                    Stream& stream);
  /// out = slice `rank` of the element-wise reduction of every rank's `in`; in.elements() =
  /// size * out.elements(). `out` may be this rank's own slice of `in`. f64, f32, bf16, f16, i64,
  /// i32.
  void reduce_scatter(const View& out, const ConstView& in, Reduction reduction, Stream& stream);
  /// f64, f32, bf16, f16, i64, i32.
  void all_reduce(const View& inout, Reduction reduction, Stream& stream);
  /// inout of rank `root` (in this group) becomes everybody's; any dtype.
  void broadcast(const View& inout, int root, Stream& stream);
  /// One paired step of a larger exchange: the buffers of `send` go to rank `to` while those of
  /// `receive` come from rank `from` (ranks of this group), all as one operation. All lists have
  /// one length, and buffer i of a sender has the bytes of buffer i of its receiver; any dtypes,
  /// buffers may be empty. Distance 0 (to = from = this rank) is a copy.
  void exchange(std::span<const ConstView> send, int to, std::span<const View> receive, int from,
                Stream& stream);
  /// Blocks the host until every rank is here. Does not wait for streams.
  void barrier();

  /// Bytes this rank has received from peers since construction or the last reset, by the formulas
  /// of a ring: all_gather and reduce_scatter (n-1)/n of the total, all_reduce twice that,
  /// broadcast all but on the root, exchange what comes in. The same on every backend. A captured
  /// collective counts once, at capture.
  int64_t wire_bytes() const { return wire_bytes_; }
  void reset_wire_bytes() { wire_bytes_ = 0; }
  /// Collectives issued so far; the number in messages.
  int64_t issued() const { return issued_; }

 protected:
  Communicator(std::string name, std::vector<int> members, int rank, Device device);

  /// `gather #17 all_gather of e4m3 [4096] on "gather" (ranks 0, 1)`, for messages.
  std::string describe(const char* kind) const;

 private:
  virtual void start_all_gather(const View& out, const ConstView& in, Stream& stream) = 0;
  virtual std::unique_ptr<FixedPart> start_fix(const ConstView& part, std::vector<ByteRange> own) {
    return std::make_unique<FixedPart>(part, std::move(own));
  }
  virtual void start_fixed_all_gather(const View& out, const FixedPart& part, Stream& stream) {
    start_all_gather(out, part.part(), stream);
  }
  virtual void start_all_gather_v(const View& out, const ConstView& in,
                                  std::span<const int64_t> counts, Stream& stream) = 0;
  virtual void start_reduce_scatter(const View& out, const ConstView& in, Reduction reduction,
                                    Stream& stream) = 0;
  virtual void start_all_reduce(const View& inout, Reduction reduction, Stream& stream) = 0;
  virtual void start_broadcast(const View& inout, int root, Stream& stream) = 0;
  /// Called on every rank of the group, also on those that neither send nor receive a byte.
  virtual void start_exchange(std::span<const ConstView> send, int to,
                              std::span<const View> receive, int from, Stream& stream) = 0;
  virtual void start_barrier() = 0;
  void check_operand(const char* kind, const ConstView& view, const Stream& stream) const;
  void check_all_gather(const View& out, const ConstView& in, const Stream& stream);

  std::string name_;
  std::vector<int> members_;
  int rank_;
  Device device_;
  int64_t wire_bytes_ = 0;
  int64_t issued_ = 0;
};

}  // namespace rowshard
