// How a World makes its communicators; not for other rooms.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator.h"

namespace rowshard {

/// Who is in the group, and the channel that no other communicator uses.
struct Group {
  std::string name;
  std::vector<int> members;  // ranks of the world
  int rank;                  // in the group
  int channel;
};

std::unique_ptr<Communicator> make_host_communicator(const Group& group, HostEngine& engine);
/// One rank on cuda: copies on the stream.
std::unique_ptr<Communicator> make_self_communicator(const Group& group, Device device);
/// cuda operands through pinned host memory and `host`; blocks the host. `peer`: fixed parts are
/// read out of the peers' memory, which blocks nothing.
std::unique_ptr<Communicator> make_staged_communicator(const Group& group, Device device,
                                                       std::unique_ptr<Communicator> host,
                                                       bool peer);
class NcclPool;
/// NCCL communicators whose owners are gone, for the next ones over the same ranks.
std::shared_ptr<NcclPool> make_nccl_pool();
void empty_nccl_pool(NcclPool& pool, bool abort);

struct NcclOptions {
  Watchdog& watchdog;
  std::shared_ptr<NcclPool> pool;
  bool peer;       // fixed parts are read out of the peers' memory where that can be
  double timeout;  // of the set-up, seconds
};
/// `host` has the same members: the id travels over it, and barriers.
std::unique_ptr<Communicator> make_nccl_communicator(const Group& group, Device device,
                                                     std::unique_ptr<Communicator> host,
                                                     NcclOptions options);

/// Other ranks' memory, opened by this process through CUDA IPC. Only for cuda builds.
class PeerMemory {
 public:
  /// Collective over `host`. `part` is cuda memory of the same size on all ranks. `failure` is
  /// empty when every rank can read every part, else it says why not, the same on all ranks, and
  /// nothing is open.
  PeerMemory(const ConstView& part, Communicator& host);
  ~PeerMemory();  // closes; collective waiting is the caller's
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  const std::string& failure() const { return failure_; }
  /// A rank's part, as this process may read and write it.
  std::byte* part(int rank) const { return const_cast<std::byte*>(parts_[rank]); }
  /// Copies every other rank's part to its place in `out`, and of this rank's the bytes `own`, on
  /// the copy engines.
  void gather(const View& out, std::span<const ByteRange> own, Stream& stream) const;

 private:
  ConstView part_;
  int rank_;
  std::vector<const std::byte*> parts_;  // by rank; this rank's own in place
  std::vector<void*> opened_;
  std::string failure_;
};

/// A fixed part whose gathers read the peers' memory, opened through CUDA IPC, by the copy engines.
/// Only for cuda builds. Collective over `host`, which has the same members and outlives the part;
/// so is the part's end. Null when a rank cannot read another's part: `why_not` then says why, the
/// same on all ranks.
std::unique_ptr<FixedPart> fix_peer_part(const ConstView& part, std::vector<ByteRange> own,
                                         Communicator& host, std::string& why_not);
/// Queues the copies; false when `part` was made by another call.
bool gather_from_peers(const View& out, const FixedPart& part, Stream& stream);

/// Copies between device memories on a stream, by the copy engines.
void copy_by_engine(std::span<void* const> to, std::span<const void* const> from,
                    std::span<const size_t> bytes, Stream& stream);

/// Paired exchanges by the copy engines: no kernel, and the host waits for nobody. Every rank has
/// a box for each peer, of a few slots. A sender pushes what travels into its box at the receiver,
/// a slot at a time, and then raises a count there; the receiver's stream waits for the count,
/// copies to where it is wanted, and raises one at the sender, whose stream waits for it before it
/// fills that slot again. Only for cuda builds.
class PeerMailbox {
 public:
  static constexpr int64_t kSlotBytes = int64_t{8} << 20;
  static constexpr size_t kSlots = 2;  // one is filled while the other is emptied

  /// Collective over `host`, and so is the end. `failure` is empty, or says why it cannot be, the
  /// same on all ranks.
  PeerMailbox(Device device, Communicator& host);
  ~PeerMailbox();
  PeerMailbox(const PeerMailbox&) = delete;
  PeerMailbox& operator=(const PeerMailbox&) = delete;

  const std::string& failure() const { return failure_; }
  /// As Communicator::exchange, to another rank. Not while the stream is captured.
  void exchange(std::span<const ConstView> send, int to, std::span<const View> receive, int from,
                Stream& stream);
  /// Lets streams that wait for peers go on, with undefined data. From any thread.
  void abort();
  /// The end will not wait for peers, and leaves the memory where it is: the job has failed.
  void abandon() { abandoned_ = true; }

  /// What of one buffer travels in a slot.
  struct Piece {
    size_t buffer;
    int64_t offset, at, bytes;  // in the buffer, and in the slot
  };

 private:
  using Count = uint32_t;
  Count* arrived(int owner, int sender) const;
  Count* consumed(int owner, int receiver) const;
  std::byte* slot(int owner, int sender, Count number) const;
  void push(std::span<const ConstView> send, const std::vector<Piece>& slot, int to);
  void pull(std::span<const View> receive, const std::vector<Piece>& slot, int from,
            Stream& stream);

  Device device_;
  Communicator& host_;
  int rank_, unwinding_;
  bool abandoned_ = false;
  std::byte* own_ = nullptr;  // counts, then boxes
  std::unique_ptr<PeerMemory> memory_;
  std::unique_ptr<Stream> send_stream_, abort_stream_;
  std::vector<std::atomic<Count>> sent_, received_;  // slots, by peer
  std::string failure_;
};

}  // namespace rowshard
