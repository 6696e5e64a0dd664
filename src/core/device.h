// The two devices, and streams and events on them, behind one interface.
//
// A host stream runs work when it is issued; only a communicator may leave one non-blocking
// operation pending on it (`add_pending`). An event records what was pending when it was recorded,
// and waiting for the event finishes it. So code written for cuda streams has the same meaning on
// the host. Handles are move-only and destroyed with their object.
//
// Thread safety: a Stream or an Event belongs to one host thread at a time.
#pragma once

#include <compare>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"

namespace rowshard {

/// kPlan has no memory: allocations are counted and operations check their operands and do nothing.
/// Running a step on it is how `rowshard plan` knows every byte without a model in memory.
enum class DeviceKind { kHost, kCuda, kPlan };
const char* to_string(DeviceKind kind);

struct Device {
  DeviceKind kind = DeviceKind::kHost;
  int index = 0;  // cuda ordinal in this process; 0 on the host

  bool is_cuda() const { return kind == DeviceKind::kCuda; }
  bool is_host() const { return kind == DeviceKind::kHost; }
  bool is_plan() const { return kind == DeviceKind::kPlan; }
  auto operator<=>(const Device&) const = default;
};
inline constexpr Device kHost{};
std::string to_string(Device device);
std::ostream& operator<<(std::ostream& out, Device device);

/// Number of visible GPUs; 0 without a driver. `cuda_unavailable_reason` says why it is 0: not
/// built in, no driver, no device.
int cuda_device_count();
std::string cuda_unavailable_reason();
/// Makes `device` current for this thread (no-op for host). Throws DeviceError with the remedy when
/// the device is not there or this binary was built without CUDA.
void set_device(Device device);
/// Compute capability x 10 (90 on Hopper); 0 for the host.
int compute_capability(Device device);
int multiprocessor_count(Device device);
std::string device_name(Device device);
/// Waits for everything queued on the device.
void synchronize(Device device);

/// A non-blocking host operation, finished at most once.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void finish() = 0;  // blocks; throws what the operation threw
};

class Event;

class Stream {
 public:
  /// priority: 0 normal, < 0 higher (cuda's convention).
  explicit Stream(Device device, std::string name = "compute", int priority = 0);
  ~Stream();
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;

  Device device() const { return device_; }
  const std::string& name() const { return name_; }
  void* native() const { return native_; }  // cudaStream_t; null on the host

  /// Work issued on this stream from now on starts after the event has happened.
  void wait(const Event& event);
  /// Blocks the calling thread until all issued work is done.
  void synchronize();
  /// True while the stream is recording a CUDA graph: no host decision may be made now.
  bool capturing() const;

  void add_pending(std::shared_ptr<Pending> pending) { pending_.push_back(std::move(pending)); }

 private:
  friend class Event;
  Device device_;
  std::string name_;
  void* native_ = nullptr;
  std::vector<std::shared_ptr<Pending>> pending_;
};

class Event {
 public:
  explicit Event(Device device, bool timing = false);
  ~Event();
  Event(Event&&) noexcept;
  Event& operator=(Event&&) noexcept;

  void record(Stream& stream);
  void synchronize() const;
  bool recorded() const { return recorded_; }
  void* native() const { return native_; }

 private:
  friend class Stream;
  friend double elapsed_ms(const Event& begin, const Event& end);
  Device device_;
  void* native_ = nullptr;
  bool recorded_ = false;
  double host_time_ = 0;  // seconds, for elapsed_ms on the host
  mutable std::vector<std::shared_ptr<Pending>> pending_;
};

/// Milliseconds between two recorded timing events; waits for `end`.
double elapsed_ms(const Event& begin, const Event& end);

/// Seconds of a steady clock.
double now_seconds();

/// Throws DeviceError unless the device is the host: the cuda path is not in this binary.
void require_host(Device device);

}  // namespace rowshard

// Calls `cuda::f(...)` or `host::f(...)` by the device, nothing on the plan device; f returns void
// and both live in the caller's namespace.
#if ROWSHARD_CUDA
#define ROWSHARD_DISPATCH(device, call) \
  ((device).is_plan() ? void() : (device).is_cuda() ? cuda::call : host::call)
#else
#define ROWSHARD_DISPATCH(device, call) \
  ((device).is_plan() ? void() : (::rowshard::require_host(device), host::call))
#endif
