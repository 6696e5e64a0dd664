// How ranks without MPI find each other: one connected socket between every two of them.
#pragma once

#include <vector>

#include "comm/launch_environment.h"
#include "comm/tcp_socket.h"

namespace rowshard {

/// Sockets by rank (the own entry is empty). Rank 0 listens on launch.master_port, or, where that
/// is taken, on one of the ports after it; the others look for it there and recognise their own job
/// by its id. Throws CommTimeout that names the ranks that did not come, on every rank that did.
std::vector<Socket> tcp_rendezvous(const LaunchEnvironment& launch, double timeout);

}  // namespace rowshard
