// Small messages between all ranks before, and beside, the communicators: addresses, ids, checks.
//
// One implementation over a Transport: MPI where an MPI launcher started the job, TCP under
// torchrun and srun, none for one rank. Every call is collective over all ranks, blocks, and throws
// CommTimeout naming the missing ranks at the deadline. One host thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/launch_environment.h"

namespace rowshard {

class HostEngine;

/// Channels below are the bootstrap's own; communicators count from here.
inline constexpr int kFirstChannel = 2;

using Bytes = std::vector<std::byte>;

class Bootstrap {
 public:
  /// MPI, TCP or self, as `launch` says. Throws ConfigError when ranks and launcher do not fit
  /// together, CommTimeout when ranks are missing.
  static std::unique_ptr<Bootstrap> create(const LaunchEnvironment& launch);
  ~Bootstrap();

  int rank() const;
  int size() const;
  /// What every rank gave, in rank order; lengths may differ.
  std::vector<Bytes> all_gather(std::span<const std::byte> bytes);
  std::vector<std::string> all_gather(const std::string& text);
  Bytes broadcast(std::span<const std::byte> bytes, int root);
  void barrier();

  /// After a failure, when nothing can be relied on: what every rank answers inside `seconds`;
  /// nullopt from ranks that do not.
  std::vector<std::optional<std::string>> survey(const std::string& text, double seconds);
  /// What is known of a peer that is gone; any thread may ask.
  std::optional<std::string> lost_peer() const;

  /// Tells every peer that this rank has failed and why (peers then throw CommError with the text),
  /// and ends the job: does not return under MPI. No-op for one rank.
  void abort(const std::string& why);
  /// Closes without waiting for anybody; for unwinding. The destructor waits, inside the deadline.
  void abandon();

  /// Moves bytes for the host communicators.
  HostEngine& engine() { return *engine_; }

 private:
  explicit Bootstrap(std::unique_ptr<HostEngine> engine);
  std::unique_ptr<HostEngine> engine_;
  int64_t sequence_ = 0;
  bool abandoned_ = false;
};

}  // namespace rowshard
