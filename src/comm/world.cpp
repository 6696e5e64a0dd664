#include "comm/world.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <map>
#include <sstream>

#include "comm/backends.h"
#include "comm/host_engine.h"
#include "core/environment.h"

#if ROWSHARD_CUDA
#include "comm/cuda_watch.h"
#include "core/cuda_check.h"
#endif

namespace rowshard {
namespace {

constexpr double kSurveySeconds = 3;
constexpr size_t kLongText = 200;

std::string read_host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

/// An id that no other GPU has; empty on the host.
std::string device_uuid(Device device) {
#if ROWSHARD_CUDA
  if (device.is_cuda()) {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
    return std::string(properties.uuid.bytes, sizeof(properties.uuid.bytes));
  }
#endif
  (void)device;
  return "";
}

/// Ranks by what they said.
std::map<std::string, std::vector<int>> group_by(const std::vector<std::string>& texts) {
  std::map<std::string, std::vector<int>> groups;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    groups[texts[rank]].push_back(static_cast<int>(rank));
  }
  return groups;
}

/// Texts that differ, cut to where they begin to.
std::string excerpt(const std::string& text, const std::string& other) {
  if (text.size() <= kLongText)
    return text;
  const size_t at = static_cast<size_t>(
      std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first - text.begin());
  const size_t begin = at > kLongText / 4 ? at - kLongText / 4 : 0;
  return message(begin ? "… " : "", text.substr(begin, kLongText),
                 begin + kLongText < text.size() ? " …" : "");
}

}  // namespace

const char* to_string(CudaTransport transport) {
  switch (transport) {
    case CudaTransport::kPeer:
      return "peer";
    case CudaTransport::kNccl:
      return "nccl";
    case CudaTransport::kStaged:
      return "staged";
    case CudaTransport::kPeerStaged:
      return "peer-staged";
  }
  return "?";
}

std::unique_ptr<World> World::create(const LaunchEnvironment& launch, DeviceKind kind,
                                     CudaTransport transport) {
  std::unique_ptr<World> world(new World);
  world->unwinding_at_start_ = std::uncaught_exceptions();
  world->launch_ = launch;
  world->transport_ = transport;
  world->host_name_ = read_host_name();
  world->bootstrap_ = Bootstrap::create(launch);
  world->watchdog_ = std::make_unique<Watchdog>(world->bootstrap_->engine().timeout());
  // What fails below fails on every rank alike, so an orderly end is possible.
  world->creating_ = true;
  world->find_local_ranks();
  world->agree("device", message(to_string(kind), kind == DeviceKind::kCuda ? " over " : "",
                                 kind == DeviceKind::kCuda ? to_string(transport) : ""));
  world->choose_device(kind);
  if (kind == DeviceKind::kCuda && world->size() > 1) {
    World* self = world.get();
    world->watchdog_->set_explain([self] { return self->what_ranks_know(); });
    world->watchdog_->add_probe([self] { return self->bootstrap_->lost_peer(); });
  }
  world->creating_ = false;
  return world;
}

World::~World() {
  watchdog_.reset();  // before the bootstrap says goodbye: peers that leave are not lost
  const bool unwinding = std::uncaught_exceptions() > unwinding_at_start_;
#if ROWSHARD_CUDA
  if (nccl_pool_)
    empty_nccl_pool(*nccl_pool_, /*abort=*/unwinding || aborted_);
#endif
  if (bootstrap_ && ((unwinding && !creating_) || aborted_))
    bootstrap_->abandon();
}

void World::find_local_ranks() {
  const std::vector<std::string> hosts = bootstrap_->all_gather(host_name_);
  const auto here = [&](const std::string& host) { return host == host_name_; };
  if (launch_.local_rank < 0) {
    launch_.local_rank =
        static_cast<int>(std::count_if(hosts.begin(), hosts.begin() + rank(), here));
  }
  if (launch_.local_world_size == 0) {
    launch_.local_world_size = static_cast<int>(std::count_if(hosts.begin(), hosts.end(), here));
  }
}

void World::choose_device(DeviceKind kind) {
  device_ = kHost;
  if (kind == DeviceKind::kHost)
    return;
  // A rank that finds no device must not leave the others waiting: all hear of it.
  std::string error;
  std::string uuid;
  try {
    const int count = cuda_device_count();
    int index = launch_.local_rank;
    if (count == 1)
      index = 0;  // one visible to each rank; a shared one is found below
    if (is_staged(transport_) && count > 0)
      index = launch_.local_rank % count;
    device_ = {DeviceKind::kCuda, index};
    set_device(device_);
    uuid = device_uuid(device_);
  } catch (const Error& caught) {
    error = message("rank ", rank(), " on ", host_name_, ": ", caught.what());
  }
  std::string errors;
  for (const std::string& text : bootstrap_->all_gather(error)) {
    if (!text.empty())
      errors += (errors.empty() ? "" : "; ") + text;
  }
  ROWSHARD_CHECK(errors.empty(), DeviceError, errors);
  if (is_staged(transport_))
    return;
  for (const auto& [gpu, ranks] : group_by(bootstrap_->all_gather(uuid))) {
    ROWSHARD_CHECK(ranks.size() == 1, SharedGpuError, rank_list(ranks),
                   " share one GPU (seen from ", host_name_, ", local rank ", launch_.local_rank,
                   " of ", launch_.local_world_size,
                   "); start one rank per GPU, check CUDA_VISIBLE_DEVICES, or choose the staged "
                   "transport for a slow run on one GPU");
  }
}

void World::check_groups(const std::string& name, const std::vector<int>& ranks) {
  std::string own = name + ":";
  for (const int member : ranks)
    own += message(" ", member);
  // Every rank looks at every rank's answer, so that all of them come to the same verdict.
  const std::vector<std::string> all = bootstrap_->all_gather(own);
  for (int other = 0; other < size(); ++other) {
    const size_t colon = all[other].rfind(':');
    const std::string other_name = all[other].substr(0, colon);
    const std::string list = all[other].substr(colon + 1);
    ROWSHARD_CHECK(other_name == all[0].substr(0, all[0].rfind(':')), ConfigError, "rank ", other,
                   " makes communicator \"", other_name, "\" while rank 0 makes \"",
                   all[0].substr(0, all[0].rfind(':')),
                   "\": all ranks make communicators in one order");
    std::istringstream members(list);
    bool holds_itself = false;
    for (int member; members >> member;) {
      ROWSHARD_CHECK(member >= 0 && member < size() && all[member] == all[other], ConfigError,
                     "communicator \"", name, "\": rank ", other, " gives the ranks", list,
                     ", but rank ", member,
                     " is not there or gives others; the members of a group "
                     "give one list");
      holds_itself |= member == other;
    }
    ROWSHARD_CHECK(holds_itself, ConfigError, "communicator \"", name, "\": rank ", other,
                   " is not in its own list", list);
  }
}

std::unique_ptr<Communicator> World::make(const std::string& name, const std::vector<int>& ranks,
                                          Device device) {
  check_groups(name, ranks);
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  const Group group{name, ranks, static_cast<int>(own - ranks.begin()), next_channel_++};
  if (device.is_host())
    return make_host_communicator(group, bootstrap_->engine());
  if (ranks.size() == 1)
    return make_self_communicator(group, device);
#if ROWSHARD_CUDA
  auto host = make_host_communicator(group, bootstrap_->engine());
  if (is_staged(transport_)) {
    return make_staged_communicator(group, device, std::move(host),
                                    transport_ == CudaTransport::kPeerStaged);
  }
  if (!nccl_pool_)
    nccl_pool_ = make_nccl_pool();
  return make_nccl_communicator(
      group, device, std::move(host),
      {*watchdog_, nccl_pool_, transport_ == CudaTransport::kPeer, bootstrap_->engine().timeout()});
#else
  throw DeviceError(cuda_unavailable_reason());
#endif
}

std::unique_ptr<Communicator> World::communicator(const std::string& name,
                                                  const std::vector<int>& ranks) {
  return make(name, ranks, device_);
}

std::unique_ptr<Communicator> World::communicator(const std::string& name) {
  return split(name, 0, rank());
}

std::unique_ptr<Communicator> World::split(const std::string& name, int color, int key) {
  struct Entry {
    int color;
    int key;
  };
  const Entry own{color, key};
  const std::vector<Bytes> all = bootstrap_->all_gather(std::as_bytes(std::span(&own, 1)));
  std::vector<std::pair<int, int>> group;  // (key, rank)
  for (int other = 0; other < size(); ++other) {
    const Entry& entry = *reinterpret_cast<const Entry*>(all[other].data());
    if (entry.color == color)
      group.emplace_back(entry.key, other);
  }
  std::sort(group.begin(), group.end());
  std::vector<int> ranks;
  for (const auto& [_, member] : group)
    ranks.push_back(member);
  return make(name, ranks, device_);
}

std::unique_ptr<Communicator> World::host_communicator(const std::string& name,
                                                       const std::vector<int>& ranks) {
  return make(name, ranks, kHost);
}

void World::agree(const std::string& name, const std::string& text) {
  const auto groups = group_by(bootstrap_->all_gather(text));
  if (groups.size() == 1)
    return;
  // What most ranks say is the measure; among equals what the lowest rank says.
  const auto measure =
      std::max_element(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
        return a.second.size() != b.second.size() ? a.second.size() < b.second.size()
                                                  : a.second.front() > b.second.front();
      });
  std::string differing;
  for (const auto& [value, ranks] : groups) {
    if (value == measure->first)
      continue;
    differing +=
        message(differing.empty() ? "" : "; ", rank_list(ranks),
                ranks.size() == 1 ? " has \"" : " have \"", excerpt(value, measure->first), "\"");
  }
  throw ConfigError(message(name, " must be the same on all ranks: ", differing, "; ",
                            rank_list(measure->second),
                            measure->second.size() == 1 ? " has \"" : " have \"",
                            excerpt(measure->first, groups.begin()->first == measure->first
                                                        ? std::next(groups.begin())->first
                                                        : groups.begin()->first),
                            "\""));
}

void World::barrier() {
  check();
  bootstrap_->barrier();
}

void World::check() const {
  watchdog_->check();
}

void World::watch(Stream& stream, const std::string& what) {
  check();
#if ROWSHARD_CUDA
  if (stream.device().is_cuda() && size() > 1) {
    CudaWatch watch(*watchdog_, stream,
                    message("rank ", rank(), ": ", what,
                            " did not finish within its deadline (ROWSHARD_COMM_TIMEOUT)"));
    watch.issued();
  }
#else
  (void)stream;
  (void)what;
#endif
}

std::string World::what_ranks_know() {
  std::vector<int> silent;
  const auto answers = bootstrap_->survey("waiting", kSurveySeconds);
  for (int other = 0; other < size(); ++other) {
    if (!answers[other])
      silent.push_back(other);
  }
  if (silent.empty())
    return "; all ranks are waiting: they issued different collectives";
  return message("; ", rank_list(silent), " did not answer within ", kSurveySeconds,
                 " s more: dead, stuck, or not in a collective");
}

void World::abort(const std::string& message) {
  aborted_ = true;
  if (watchdog_)
    watchdog_->fail(message);
  bootstrap_->abort(message);
}

}  // namespace rowshard
