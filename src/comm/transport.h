// Ordered byte messages between the ranks of the job: all that differs between MPI and TCP.
//
// Messages from one rank to another on one channel arrive in the order sent. `sequence` is the
// number of the collective that a message belongs to; a receiver that expects another number or
// size throws CommError, because ranks then issue different collectives. One host thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/launch_environment.h"

namespace rowshard {

/// One message on its way. Its memory must stay until `test` returns true.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Moves bytes and says whether this message is through; never blocks. Throws CommError when the
  /// peer is gone or has sent something else.
  virtual bool test() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }

  virtual std::unique_ptr<Transfer> send(int peer, int channel, int64_t sequence,
                                         const std::byte* data, int64_t bytes) = 0;
  virtual std::unique_ptr<Transfer> receive(int peer, int channel, int64_t sequence,
                                            std::byte* data, int64_t bytes) = 0;
  /// Throws CommError when a peer has told that it failed.
  virtual void check_peers() = 0;
  /// What is known of a peer that is gone; the one call that any thread may make.
  virtual std::optional<std::string> lost_peer() const { return std::nullopt; }
  /// Tells all peers that this rank failed and why, then ends the job as far as the transport can.
  virtual void abort(const std::string& why) = 0;
  /// After the last message of all ranks; not after a failure.
  virtual void close() = 0;

 protected:
  Transport(int rank, int size) : rank_(rank), size_(size) {}
  std::string notice(const std::string& why) const {
    return "rank " + std::to_string(rank_) + " ended the job: " + why;
  }

 private:
  int rank_;
  int size_;
};

std::unique_ptr<Transport> make_self_transport();
/// Calls MPI_Init. Throws ConfigError when MPI and the launcher do not agree on rank and size.
std::unique_ptr<Transport> make_mpi_transport(const LaunchEnvironment& launch, double timeout);
/// Rank 0 waits for the others at master_addr, at master_port or one of the ports after it; then
/// every pair of ranks connects. Throws CommTimeout naming the missing ranks.
std::unique_ptr<Transport> make_tcp_transport(const LaunchEnvironment& launch, double timeout);

}  // namespace rowshard
