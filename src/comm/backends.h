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
/// `host` has the same members: the id travels over it, and barriers.
std::unique_ptr<Communicator> make_nccl_communicator(const Group& group, Device device,
                                                     std::unique_ptr<Communicator> host,
                                                     Watchdog& watchdog, double timeout);

}  // namespace rowshard
