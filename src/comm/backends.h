// How a World makes its communicators; not for other rooms.
#pragma once

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
/// cuda operands through pinned host memory and `host`; blocks the host.
std::unique_ptr<Communicator> make_staged_communicator(const Group& group, Device device,
                                                       std::unique_ptr<Communicator> host);
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
  /// Copies every rank's part to its place in `out`, on the copy engines.
  void gather(const View& out, Stream& stream) const;

 private:
  ConstView part_;
  int rank_;
  std::vector<const std::byte*> parts_;  // by rank; this rank's own in place
  std::vector<void*> opened_;
  std::string failure_;
};

}  // namespace rowshard
