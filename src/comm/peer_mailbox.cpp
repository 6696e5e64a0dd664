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

using Piece = PeerMailbox::Piece;

/// What travels, slot by slot. Both ends cut equal sizes alike.
template <typename V>
std::vector<std::vector<Piece>> slots_of(std::span<const V> views) {
  std::vector<std::vector<Piece>> slots;
  int64_t at = PeerMailbox::kSlotBytes;  // in the last slot
  for (size_t buffer = 0; buffer < views.size(); ++buffer) {
    for (int64_t offset = 0; offset < views[buffer].bytes();) {
      at = round_up(at, kAlign);
      if (at >= PeerMailbox::kSlotBytes) {
        slots.emplace_back();
        at = 0;
      }
      const int64_t bytes = std::min(views[buffer].bytes() - offset, PeerMailbox::kSlotBytes - at);
      slots.back().push_back({buffer, offset, at, bytes});
      offset += bytes;
      at += bytes;
    }
  }
  return slots;
}

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
  const int64_t total = counts + static_cast<int64_t>(host.size() * kSlots) * kSlotBytes;
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
  return memory_->part(owner) + counts +
         static_cast<int64_t>(sender * kSlots + number % kSlots) * kSlotBytes;
}

void PeerMailbox::push(std::span<const ConstView> send, const std::vector<Piece>& pieces, int to) {
  const Count number = ++sent_[to];
  // Of the first slots this is a count below 0, which is there.
  check(wait_count(consumed(rank_, to), number - Count{kSlots}, *send_stream_), "wait");
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<size_t> bytes;
  for (const Piece& piece : pieces) {
    targets.push_back(slot(to, rank_, number) + piece.at);
    sources.push_back(send[piece.buffer].byte_data() + piece.offset);
    bytes.push_back(static_cast<size_t>(piece.bytes));
  }
  copy_by_engine(targets, sources, bytes, *send_stream_);
  check(write_count(arrived(to, rank_), number, *send_stream_), "write");
}

void PeerMailbox::pull(std::span<const View> receive, const std::vector<Piece>& pieces, int from,
                       Stream& stream) {
  const Count number = ++received_[from];
  check(wait_count(arrived(rank_, from), number, stream), "wait");
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<size_t> bytes;
  for (const Piece& piece : pieces) {
    targets.push_back(receive[piece.buffer].byte_data() + piece.offset);
    sources.push_back(slot(rank_, from, number) + piece.at);
    bytes.push_back(static_cast<size_t>(piece.bytes));
  }
  copy_by_engine(targets, sources, bytes, stream);
  check(write_count(consumed(from, rank_), number, stream), "write");
}

void PeerMailbox::exchange(std::span<const ConstView> send, int to, std::span<const View> receive,
                           int from, Stream& stream) {
  Event begun(device_), sent(device_);
  begun.record(stream);
  send_stream_->wait(begun);
  const auto out = slots_of(send);
  const auto in = slots_of(receive);
  // In this order nothing waits for what is issued after it on any rank. Streams may share a
  // hardware queue, and then run in the order of issue.
  for (size_t i = 0; i < std::max(out.size(), in.size() + kSlots - 1); ++i) {
    if (i < out.size())
      push(send, out[i], to);
    const size_t behind = i - (kSlots - 1);
    if (i + 1 >= kSlots && behind < in.size())
      pull(receive, in[behind], from, stream);
  }
  sent.record(*send_stream_);
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
