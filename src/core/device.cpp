#include "core/device.h"

#include <chrono>
#include <ostream>
#include <utility>

#if ROWSHARD_CUDA
#include "core/cuda_check.h"
#endif

namespace rowshard {

const char* to_string(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kHost:
      return "host";
    case DeviceKind::kCuda:
      return "cuda";
    case DeviceKind::kPlan:
      return "plan";
  }
  return "?";
}

std::string to_string(Device device) {
  return device.is_cuda() ? message("cuda:", device.index) : std::string(to_string(device.kind));
}

std::ostream& operator<<(std::ostream& out, Device device) {
  return out << to_string(device);
}

double now_seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

void require_host(Device device) {
  ROWSHARD_CHECK(!device.is_cuda(), DeviceError, "device ", device, ": ",
                 cuda_unavailable_reason());
}

#if ROWSHARD_CUDA

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string cuda_unavailable_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return message("no usable GPU (", cudaGetErrorString(status),
                   "); use --device host, or check the driver with nvidia-smi");
  }
  if (count == 0)
    return "no GPU is visible; check CUDA_VISIBLE_DEVICES, or use --device host";
  return "";
}

void set_device(Device device) {
  if (!device.is_cuda())
    return;
  const int count = cuda_device_count();
  ROWSHARD_CHECK(device.index < count, DeviceError, "device ", device, " of ", count, " visible: ",
                 count == 0 ? cuda_unavailable_reason() : "start at most one rank per visible GPU");
  CUDA_CHECK(cudaSetDevice(device.index));
}

int compute_capability(Device device) {
  if (!device.is_cuda())
    return 0;
  int major = 0;
  int minor = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index));
  CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index));
  return major * 10 + minor;
}

int multiprocessor_count(Device device) {
  if (!device.is_cuda())
    return 0;
  int count = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index));
  return count;
}

std::string device_name(Device device) {
  if (!device.is_cuda())
    return to_string(device.kind);
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
  return properties.name;
}

void synchronize(Device device) {
  if (device.is_cuda())
    CUDA_CHECK(cudaDeviceSynchronize());
}

#else

int cuda_device_count() {
  return 0;
}
std::string cuda_unavailable_reason() {
  return "this rowshard was built without CUDA; install nvcc 12.9 or newer and build again, or use "
         "--device host";
}
void set_device(Device device) {
  require_host(device);
}
int compute_capability(Device) {
  return 0;
}
int multiprocessor_count(Device) {
  return 0;
}
std::string device_name(Device) {
  return "host";
}
void synchronize(Device) {}

#endif

Stream::Stream(Device device, std::string name, int priority)
    : device_(device), name_(std::move(name)) {
#if ROWSHARD_CUDA
  if (device_.is_cuda()) {
    set_device(device_);
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
    native_ = stream;
  }
#else
  (void)priority;
  require_host(device_);
#endif
}

Stream::~Stream() {
#if ROWSHARD_CUDA
  if (native_)
    cudaStreamDestroy(static_cast<cudaStream_t>(native_));
#endif
}

Stream::Stream(Stream&& other) noexcept
    : device_(other.device_),
      name_(std::move(other.name_)),
      native_(std::exchange(other.native_, nullptr)),
      pending_(std::move(other.pending_)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(name_, other.name_);
  std::swap(native_, other.native_);
  std::swap(pending_, other.pending_);
  return *this;
}

void Stream::wait(const Event& event) {
  ROWSHARD_CHECK(event.recorded_, LogicError, "stream ", name_,
                 ": waits for an event that was never recorded");
#if ROWSHARD_CUDA
  if (device_.is_cuda()) {
    CUDA_CHECK(
        cudaStreamWaitEvent(rowshard::native(*this), static_cast<cudaEvent_t>(event.native_), 0));
    return;
  }
#endif
  event.synchronize();  // host work runs when issued, so its inputs must be complete now
}

void Stream::synchronize() {
#if ROWSHARD_CUDA
  if (device_.is_cuda()) {
    CUDA_CHECK(cudaStreamSynchronize(rowshard::native(*this)));
    return;
  }
#endif
  for (auto& pending : std::exchange(pending_, {}))
    pending->finish();
}

bool Stream::capturing() const {
#if ROWSHARD_CUDA
  if (device_.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_CHECK(cudaStreamIsCapturing(rowshard::native(*this), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

Event::Event(Device device, bool timing) : device_(device) {
#if ROWSHARD_CUDA
  if (device_.is_cuda()) {
    cudaEvent_t event = nullptr;
    CUDA_CHECK(
        cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming));
    native_ = event;
  }
#else
  (void)timing;
  require_host(device_);
#endif
}

Event::~Event() {
#if ROWSHARD_CUDA
  if (native_)
    cudaEventDestroy(static_cast<cudaEvent_t>(native_));
#endif
}

Event::Event(Event&& other) noexcept
    : device_(other.device_),
      native_(std::exchange(other.native_, nullptr)),
      recorded_(other.recorded_),
      host_time_(other.host_time_),
      pending_(std::move(other.pending_)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(native_, other.native_);
  std::swap(recorded_, other.recorded_);
  std::swap(host_time_, other.host_time_);
  std::swap(pending_, other.pending_);
  return *this;
}

void Event::record(Stream& stream) {
  recorded_ = true;
#if ROWSHARD_CUDA
  if (device_.is_cuda()) {
    CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(native_), rowshard::native(stream)));
    return;
  }
#endif
  // The stream's order is kept: what it had pending is now this event's to finish.
  pending_ = std::exchange(stream.pending_, {});
  host_time_ = now_seconds();
}

void Event::synchronize() const {
  ROWSHARD_CHECK(recorded_, LogicError, "synchronize on an event that was never recorded");
#if ROWSHARD_CUDA
  if (device_.is_cuda()) {
    CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(native_)));
    return;
  }
#endif
  for (auto& pending : std::exchange(pending_, {}))
    pending->finish();
}

double elapsed_ms(const Event& begin, const Event& end) {
  end.synchronize();
#if ROWSHARD_CUDA
  if (end.device_.is_cuda()) {
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(begin.native_),
                                    static_cast<cudaEvent_t>(end.native_)));
    return ms;
  }
#endif
  return (end.host_time_ - begin.host_time_) * 1e3;
}

}  // namespace rowshard
