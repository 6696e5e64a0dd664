#include "comm/backends.h"

#if ROWSHARD_CUDA

#include <cuda.h>
#include <unistd.h>

#include <exception>

#include "core/cuda_check.h"
#include "core/log.h"

namespace rowshard {
namespace {

/// What a rank tells the others of its part.
struct Offer {
  cudaIpcMemHandle_t handle{};  // of the allocation the part lies in
  int64_t offset = 0;
  int32_t offered = 0;
  char host[64] = "";
  char why_not[96] = "";
};

/// The runtime has no call for it.
cudaError_t allocation_of(const void* pointer, CUdeviceptr* base) {
  using Query = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);
  static const Query query = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry,
                                                                12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Query>(entry)
               : nullptr;
  }();
  size_t bytes = 0;
  if (!query || query(base, &bytes, reinterpret_cast<CUdeviceptr>(pointer)) != CUDA_SUCCESS)
    return cudaErrorNotSupported;
  return cudaSuccess;
}

Offer make_offer(const ConstView& part) {
  Offer offer;
  gethostname(offer.host, sizeof(offer.host) - 1);
  CUdeviceptr base = 0;
  cudaError_t status = allocation_of(part.data, &base);
  if (status == cudaSuccess)
    status = cudaIpcGetMemHandle(&offer.handle, reinterpret_cast<void*>(base));
  if (status == cudaSuccess) {
    offer.offset = static_cast<int64_t>(reinterpret_cast<CUdeviceptr>(part.data) - base);
    offer.offered = 1;
  } else {
    cudaGetLastError();
    std::snprintf(offer.why_not, sizeof(offer.why_not), "no IPC handle (%s)",
                  cudaGetErrorString(status));
  }
  return offer;
}

template <typename T>
std::vector<T> exchange(const T& own, Communicator& host) {
  std::vector<T> all(host.size());
  Stream stream(kHost);
  const auto bytes = static_cast<int64_t>(sizeof(T));
  host.all_gather(View(all.data(), DType::kU8, {bytes * host.size()}, kHost),
                  ConstView(&own, DType::kU8, {bytes}, kHost), stream);
  return all;
}

struct Verdict {
  char why_not[192] = "";
};

}  // namespace

PeerMemory::PeerMemory(const ConstView& part, Communicator& host)
    : part_(part), rank_(host.rank()), parts_(host.size()) {
  const std::vector<Offer> offers = exchange(make_offer(part), host);
  Verdict own;
  const auto refuse = [&own](const std::string& text) {
    std::snprintf(own.why_not, sizeof(own.why_not), "%s", text.c_str());
  };
  for (int peer = 0; peer < host.size() && !own.why_not[0]; ++peer) {
    const Offer& offer = offers[peer];
    const int number = host.members()[peer];
    if (peer == rank_) {
      parts_[peer] = part.byte_data();
    } else if (!offer.offered) {
      refuse(message("rank ", number, " has ", offer.why_not));
    } else if (std::string(offer.host) != offers[rank_].host) {
      refuse(message("rank ", number, " is on another machine than rank ", host.members()[rank_]));
    } else {
      void* base = nullptr;
      const cudaError_t status =
          cudaIpcOpenMemHandle(&base, offer.handle, cudaIpcMemLazyEnablePeerAccess);
      if (status == cudaSuccess) {
        opened_.push_back(base);
        parts_[peer] = static_cast<const std::byte*>(base) + offer.offset;
      } else {
        cudaGetLastError();
        refuse(message("rank ", host.members()[rank_], " cannot open memory of rank ", number, ": ",
                       cudaGetErrorString(status)));
      }
    }
  }
  for (const Verdict& verdict : exchange(own, host)) {
    if (failure_.empty())
      failure_ = verdict.why_not;
  }
}

PeerMemory::~PeerMemory() {
  for (void* base : opened_)
    cudaIpcCloseMemHandle(base);
}

void PeerMemory::gather(const View& out, std::span<const ByteRange> own, Stream& stream) const {
  const int size = static_cast<int>(parts_.size());
  const int64_t bytes = part_.bytes();
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> sizes;
  const auto add = [&](int peer, const ByteRange& range) {
    std::byte* slice = out.byte_data() + peer * bytes;
    if (slice == parts_[peer] || range.begin == range.end)
      return;
    to.push_back(slice + range.begin);
    from.push_back(parts_[peer] + range.begin);
    sizes.push_back(static_cast<size_t>(range.end - range.begin));
  };
  // Each rank begins with its neighbour, so that not all of them read rank 0 first. Its own part is
  // last: it crosses no link.
  for (int step = 1; step < size; ++step)
    add((rank_ + step) % size, {0, bytes});
  for (const ByteRange& range : own)
    add(rank_, range);
  if (stream.capturing()) {
    for (size_t i = 0; i < to.size(); ++i) {
      CUDA_CHECK(cudaMemcpyAsync(to[i], from[i], sizes[i], cudaMemcpyDefault, native(stream)));
    }
    return;
  }
  copy_by_engine(to, from, sizes, stream);
}

void copy_by_engine(std::span<void* const> to, std::span<const void* const> from,
                    std::span<const size_t> bytes, Stream& stream) {
  if (to.empty())
    return;
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;  // also inside one memory
  size_t first = 0;
  auto* const targets = const_cast<void**>(to.data());
#if CUDART_VERSION >= 13000
  CUDA_CHECK(cudaMemcpyBatchAsync(targets, const_cast<const void**>(from.data()), bytes.data(),
                                  to.size(), &attributes, &first, 1, native(stream)));
#else
  size_t failed = 0;
  CUDA_CHECK(cudaMemcpyBatchAsync(targets, const_cast<void**>(from.data()),
                                  const_cast<size_t*>(bytes.data()), to.size(), &attributes, &first,
                                  1, &failed, native(stream)));
#endif
}

namespace {

/// Closes what was opened only once no rank reads it any more.
class PeerPart : public FixedPart {
 public:
  PeerPart(const ConstView& part, std::vector<ByteRange> own, std::unique_ptr<PeerMemory> memory,
           Communicator& host)
      : FixedPart(part, std::move(own)),
        memory_(std::move(memory)),
        host_(host),
        unwinding_(unwinding()) {}
  ~PeerPart() override {
    // Unwinding must not wait for peers. They may lose memory that they read: the job ends.
    if (unwinding() > unwinding_)
      return;
    try {
      synchronize(part().device);
      host_.barrier();  // nobody reads any more
      memory_.reset();
      host_.barrier();  // nobody has it open any more
    } catch (const Error& error) {
      log_once("peer part", message("letting go of the peers' memory: ", error.what()));
    }
  }
  const PeerMemory& memory() const { return *memory_; }

 private:
  static int unwinding() { return std::uncaught_exceptions(); }

  std::unique_ptr<PeerMemory> memory_;
  Communicator& host_;
  int unwinding_;
};

}  // namespace

std::unique_ptr<FixedPart> fix_peer_part(const ConstView& part, std::vector<ByteRange> own,
                                         Communicator& host, std::string& why_not) {
  auto memory = std::make_unique<PeerMemory>(part, host);
  why_not = memory->failure();
  if (!why_not.empty())
    return nullptr;
  return std::make_unique<PeerPart>(part, std::move(own), std::move(memory), host);
}

bool gather_from_peers(const View& out, const FixedPart& part, Stream& stream) {
  const auto* peer = dynamic_cast<const PeerPart*>(&part);
  if (peer)
    peer->memory().gather(out, part.own(), stream);
  return peer;
}

}  // namespace rowshard

#endif
