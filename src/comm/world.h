// All ranks of the job: which one this is, its device, and the communicators between them.
//
// Made once, first thing in main, from the launch environment; outlives its communicators.
// `create`, `communicator`, `split` and `agree` are collective over all ranks, in one order.
//
// Failure. An exception on one rank must end the others: whoever catches it calls `abort(message)`,
// which tells the peers (they throw CommError with the message and this rank's number) and ends the
// job; under MPI it does not return. A World destroyed while an exception unwinds waits for nobody.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/launch_environment.h"
#include "comm/mesh.h"
#include "comm/watchdog.h"

namespace rowshard {

class NcclPool;

/// How cuda buffers travel between ranks.
enum class CudaTransport {
  kPeer,        // fixed parts by the copy engines, out of the peers' memory; all else over NCCL
  kNccl,        // everything over NCCL
  kStaged,      // pinned host memory and the host communicator: slow, bit-reproducible, and several
                // ranks may share one GPU
  kPeerStaged,  // fixed parts as kPeer, all else as kStaged: kPeer's gathers on one GPU
};
const char* to_string(CudaTransport transport);  // "peer", "nccl", "staged", "peer-staged"
/// Whether several ranks may share one GPU.
inline bool is_staged(CudaTransport transport) {
  return transport == CudaTransport::kStaged || transport == CudaTransport::kPeerStaged;
}

/// Two ranks were given one GPU.
class SharedGpuError : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

class World {
 public:
  /// Picks the device by local rank (index 0 where CUDA_VISIBLE_DEVICES leaves each rank one GPU),
  /// makes it current, and refuses two ranks on one GPU, naming both (not when is_staged).
  static std::unique_ptr<World> create(const LaunchEnvironment& launch, DeviceKind kind,
                                       CudaTransport transport = CudaTransport::kPeer);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return launch_.rank; }
  int size() const { return launch_.world_size; }
  const LaunchEnvironment& launch() const { return launch_; }  // local_rank and size filled in
  Device device() const { return device_; }
  CudaTransport transport() const { return transport_; }
  const std::string& host_name() const { return host_name_; }
  Bootstrap& bootstrap() { return *bootstrap_; }

  /// A communicator over `ranks` (of the world, in group order), which must hold this rank. Every
  /// rank of the world calls it, with the same name and the list of the group it is in; the lists
  /// are compared first.
  std::unique_ptr<Communicator> communicator(const std::string& name,
                                             const std::vector<int>& ranks);
  /// Over all ranks.
  std::unique_ptr<Communicator> communicator(const std::string& name);
  /// Over the ranks that give the same color, ordered by (key, rank).
  std::unique_ptr<Communicator> split(const std::string& name, int color, int key);
  /// The same, on the host whatever the device: control data beside a cuda job.
  std::unique_ptr<Communicator> host_communicator(const std::string& name,
                                                  const std::vector<int>& ranks);

  /// Throws ConfigError on every rank, naming the ranks that differ and both values, unless all
  /// ranks give the same text. Call it on whatever must be equal, before the first collective.
  void agree(const std::string& name, const std::string& text);
  void barrier();

  /// Throws what the watchdog has seen (cuda: a late or failed collective). Collectives call it;
  /// call it too before results leave the job.
  void check() const;
  /// Puts the work queued on `stream` under the deadline; for graph launches, whose collectives
  /// cannot be watched one by one. No-op on the host.
  void watch(Stream& stream, const std::string& what);
  void abort(const std::string& message);

 private:
  World() = default;
  void find_local_ranks();
  void choose_device(DeviceKind kind);
  std::string what_ranks_know();
  void check_groups(const std::string& name, const std::vector<int>& ranks);
  std::unique_ptr<Communicator> make(const std::string& name, const std::vector<int>& ranks,
                                     Device device);

  LaunchEnvironment launch_;
  Device device_;
  CudaTransport transport_ = CudaTransport::kPeer;
  std::string host_name_;
  std::unique_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<Watchdog> watchdog_;
  std::shared_ptr<NcclPool> nccl_pool_;  // making an NCCL communicator takes a third of a second
  int next_channel_ = kFirstChannel;
  int unwinding_at_start_ = 0;
  bool creating_ = false;
  bool aborted_ = false;
};

}  // namespace rowshard
