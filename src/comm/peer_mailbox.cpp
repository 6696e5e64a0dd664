#include "comm/backends.h"

#if ROWSHARD_CUDA

#include <cuda.h>

#include <exception>

#include "core/cuda_check.h"
#include "core/log.h"

namespace rowshard {
namespace {

constexpr int64_t kAlign = 256;  // of buffers in a slot
constexpr int64_t kCountStride = 64;

using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

/// The runtime has no call for them; null where the driver has none.
StreamValue driver_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<StreamValue>(entry)
             : nullptr;
}

CUresult write_count(uint32_t* at, uint32_t value, Stream& stream) {
  static const StreamValue write = driver_entry("cuStreamWriteValue32");
  return write ? write(native(stream), reinterpret_cast<CUdeviceptr>(at), value,
                       CU_STREAM_WRITE_VALUE_DEFAULT)
               : CUDA_ERROR_NOT_SUPPORTED;
}

/// Until the count is `value` or beyond it; counts may wrap.
CUresult wait_count(uint32_t* at, uint32_t value, Stream& stream) {
  static const StreamValue wait = driver_entry("cuStreamWaitValue32");
  return wait ? wait(native(stream), reinterpret_cast<CUdeviceptr>(at), value,
                     CU_STREAM_WAIT_VALUE_GEQ)
              : CUDA_ERROR_NOT_SUPPORTED;
}

void check(CUresult status, const char* what) {
  ROWSHARD_CHECK(status == CUDA_SUCCESS, DeviceError, what, " failed with driver error ",
                 static_cast<int>(status));
}

/// Calls fill(buffer, offset in the buffer, offset in the slot, bytes) for every piece of every
/// slot, and done() after the last of a slot. Both ends cut equal sizes alike.
template <typename Views, typename Begin, typename Fill, typename Done>
void for_each_slot(const Views& views, Begin&& begin, Fill&& fill, Done&& done) {
  int64_t at = 0;  // in the slot
  bool open = false;
  for (size_t buffer = 0; buffer < views.size(); ++buffer) {
    for (int64_t offset = 0; offset < views[buffer].bytes();) {
      at = round_up(at, kAlign);
      if (at >= PeerMailbox::kSlotBytes) {
        done();
        open = false;
        at = 0;
      }
      if (!open)
        begin();
      open = true;
      const int64_t bytes = std::min(views[buffer].bytes() - offset, PeerMailbox::kSlotBytes - at);
      fill(buffer, offset, at, bytes);
      offset += bytes;
      at += bytes;
    }
  }
  if (open)
    done();
}

/// The copies of one slot.
struct Copies {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;

  void add(void* target, const void* source, int64_t size) {
    to.push_back(target);
    from.push_back(source);
    bytes.push_back(static_cast<size_t>(size));
  }
  void run(Stream& stream) {
    copy_by_engine(to, from, bytes, stream);
    to.clear();
    from.clear();
    bytes.clear();
  }
};

}  // namespace

PeerMailbox::PeerMailbox(Device device, Communicator& host)
    : device_(device),
      host_(host),
      rank_(host.rank()),
      unwinding_(std::uncaught_exceptions()),
      send_stream_(std::make_unique<Stream>(device, "mailbox", -1)),
      abort_stream_(std::make_unique<Stream>(device, "mailbox abort")),
      sent_(host.size()),
      received_(host.size()) {
  const int64_t counts = round_up(2 * kCountStride * host.size(), int64_t{4096});
  const int64_t total = counts + host.size() * kSlots * kSlotBytes;
  CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&own_), static_cast<size_t>(total)));
  CUDA_CHECK(cudaMemsetAsync(own_, 0, static_cast<size_t>(counts), native(*send_stream_)));
  auto* const probe = reinterpret_cast<Count*>(own_ + counts - sizeof(Count));
  const bool able = write_count(probe, 1, *send_stream_) == CUDA_SUCCESS &&
                    wait_count(probe, 1, *send_stream_) == CUDA_SUCCESS;
  send_stream_->synchronize();
  memory_ = std::make_unique<PeerMemory>(View(own_, DType::kU8, {total}, device), host);
  Stream stream(kHost);
  int32_t all_able = able ? 1 : 0;
  host.all_reduce(View(&all_able, DType::kI32, {1}, kHost), Reduction::kMin, stream);
  failure_ = memory_->failure();
  if (failure_.empty() && !all_able)
    failure_ = "a driver has no stream memory operations";
}

PeerMailbox::~PeerMailbox() {
  // As with fixed parts: unwinding must not wait for peers, which may lose what they write to.
  if (abandoned_ || std::uncaught_exceptions() > unwinding_) {
    static_cast<void>(memory_.release());
    return;
  }
  try {
    synchronize(device_);
    host_.barrier();  // nobody writes any more
    memory_.reset();
    host_.barrier();  // nobody has it open any more
    cudaFree(own_);
  } catch (const Error& error) {
    log_once("peer mailbox", message("letting go of the peers' memory: ", error.what()));
  }
}

PeerMailbox::Count* PeerMailbox::arrived(int owner, int sender) const {
  return reinterpret_cast<Count*>(memory_->part(owner) + 2 * kCountStride * sender);
}

PeerMailbox::Count* PeerMailbox::consumed(int owner, int receiver) const {
  return reinterpret_cast<Count*>(memory_->part(owner) + 2 * kCountStride * receiver +
                                  kCountStride);
}

std::byte* PeerMailbox::slot(int owner, int sender, Count number) const {
  const int64_t counts = round_up(2 * kCountStride * host_.size(), int64_t{4096});
  return memory_->part(owner) + counts + (int64_t{sender} * kSlots + number % kSlots) * kSlotBytes;
}

void PeerMailbox::exchange(std::span<const ConstView> send, int to, std::span<const View> receive,
                           int from, Stream& stream) {
  Event begun(device_), sent(device_);
  begun.record(stream);
  send_stream_->wait(begun);
  Copies copies;
  for_each_slot(
      send,
      [&] {
        ++sent_[to];
        if (sent_[to] > kSlots)
          check(wait_count(consumed(rank_, to), sent_[to] - kSlots, *send_stream_), "wait");
      },
      [&](size_t buffer, int64_t offset, int64_t at, int64_t bytes) {
        copies.add(slot(to, rank_, sent_[to]) + at, send[buffer].byte_data() + offset, bytes);
      },
      [&] {
        copies.run(*send_stream_);
        check(write_count(arrived(to, rank_), sent_[to], *send_stream_), "write");
      });
  sent.record(*send_stream_);
  for_each_slot(
      receive,
      [&] {
        ++received_[from];
        check(wait_count(arrived(rank_, from), received_[from], stream), "wait");
      },
      [&](size_t buffer, int64_t offset, int64_t at, int64_t bytes) {
        copies.add(receive[buffer].byte_data() + offset, slot(rank_, from, received_[from]) + at,
                   bytes);
      },
      [&] {
        copies.run(stream);
        check(write_count(consumed(from, rank_), received_[from], stream), "write");
      });
  stream.wait(sent);
}

void PeerMailbox::abort() {
  cudaSetDevice(device_.index);
  for (int peer = 0; peer < host_.size(); ++peer) {
    // Beyond anything that is waited for.
    write_count(arrived(rank_, peer), received_[peer] + (Count{1} << 30), *abort_stream_);
    write_count(consumed(rank_, peer), sent_[peer] + (Count{1} << 30), *abort_stream_);
  }
}

}  // namespace rowshard

#endif
