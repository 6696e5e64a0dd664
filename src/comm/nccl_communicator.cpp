#include "comm/backends.h"

#if ROWSHARD_CUDA

#include <nccl.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <future>
#include <map>
#include <thread>

#include "comm/cuda_watch.h"
#include "comm/host_engine.h"
#include "core/cuda_check.h"
#include "core/log.h"

namespace rowshard {

class NcclPool {
 public:
  bool has(const std::vector<int>& members) const {
    const auto found = idle_.find(members);
    return found != idle_.end() && !found->second.empty();
  }
  ncclComm_t take(const std::vector<int>& members) {
    std::vector<ncclComm_t>& idle = idle_.at(members);
    const ncclComm_t comm = idle.back();
    idle.pop_back();
    return comm;
  }
  void give(const std::vector<int>& members, ncclComm_t comm) { idle_[members].push_back(comm); }
  void empty(bool abort) {
    for (auto& [_, idle] : idle_) {
      for (const ncclComm_t comm : idle)
        abort ? ncclCommAbort(comm) : ncclCommDestroy(comm);
    }
    idle_.clear();
  }

 private:
  std::map<std::vector<int>, std::vector<ncclComm_t>> idle_;
};

namespace {

void nccl_check(ncclResult_t status, const std::string& what) {
  if (status == ncclSuccess)
    return;
  throw CommError(message(what, ": NCCL says ", ncclGetErrorString(status), " (",
                          ncclGetLastError(nullptr), "); NCCL_DEBUG=INFO tells more"));
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return ncclFloat64;
    case DType::kF32:
      return ncclFloat32;
    case DType::kF16:
      return ncclFloat16;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kI64:
      return ncclInt64;
    case DType::kI32:
      return ncclInt32;
    default:
      throw LogicError(message("no arithmetic on ", to_string(dtype)));
  }
}

ncclRedOp_t nccl_operation(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return ncclSum;
    case Reduction::kMax:
      return ncclMax;
    case Reduction::kMin:
      return ncclMin;
  }
  throw LogicError("unknown reduction");
}

/// Set-up blocks until all ranks are there, so it runs on a thread of its own and is waited for
/// with a deadline. (A communicator made non-blocking would start a thread at every collective
/// instead.) A thread that never returns is left behind; the job ends.
ncclComm_t connect(int size, int rank, ncclUniqueId id, Device device, const std::string& what,
                   double timeout) {
  struct Outcome {
    ncclComm_t comm = nullptr;
    ncclResult_t status = ncclInternalError;
  };
  std::promise<Outcome> promise;
  std::future<Outcome> future = promise.get_future();
  std::thread([=, promise = std::move(promise)]() mutable {
    Outcome outcome;
    if (cudaSetDevice(device.index) == cudaSuccess) {
      outcome.status = ncclCommInitRank(&outcome.comm, size, id, rank);
    }
    promise.set_value(outcome);
  }).detach();
  ROWSHARD_CHECK(
      future.wait_for(std::chrono::duration<double>(timeout)) == std::future_status::ready,
      CommTimeout, what, ": NCCL set-up did not finish within ", timeout,
      " s: a rank is missing, or ranks cannot reach each other (NCCL_SOCKET_IFNAME, "
      "NCCL_DEBUG=INFO)");
  const Outcome outcome = future.get();
  nccl_check(outcome.status, what);
  return outcome.comm;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const Group& group, Device device, std::unique_ptr<Communicator> host,
                   NcclOptions options)
      : Communicator(group.name, group.members, group.rank, device),
        host_(std::move(host)),
        watchdog_(options.watchdog),
        pool_(std::move(options.pool)),
        peer_(options.peer) {
    // NVLink multicast needs a fabric manager that rented machines may lack: never a requirement.
    setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
    const std::string what = describe("set-up");
    Stream stream(kHost);
    int32_t idle = pool_->has(members()) ? 1 : 0;
    host_->all_reduce(View(&idle, DType::kI32, {1}, kHost), Reduction::kMin, stream);
    if (idle) {
      comm_ = pool_->take(members());
    } else {
      ncclUniqueId id{};
      if (rank() == 0)
        nccl_check(ncclGetUniqueId(&id), what);
      host_->broadcast(View(&id, DType::kU8, {static_cast<int64_t>(sizeof(id))}, kHost), 0, stream);
      comm_ = connect(size(), rank(), id, device, what, options.timeout);
    }
    probe_ = watchdog_.add_probe([this] { return async_error(); });
    abort_ = watchdog_.add_abort([this] { abort(); });
  }

  ~NcclCommunicator() override {
    // Unwinding must not wait for peers; otherwise what is queued ends first, or fails at its
    // deadline.
    if (std::uncaught_exceptions() == 0)
      watchdog_.drain();
    watchdog_.remove(probe_);
    watchdog_.remove(abort_);
    if (mailbox_) {
      watchdog_.remove(abort_mailbox_);
      if (aborted_ || watchdog_.failed())
        mailbox_->abandon();
      mailbox_.reset();
    }
    if (aborted_)
      return;
    if (std::uncaught_exceptions() > 0) {
      ncclCommAbort(comm_);
    } else if (watchdog_.failed()) {
      ncclCommDestroy(comm_);
    } else {
      pool_->give(members(), comm_);
    }
  }

 private:
  std::optional<std::string> async_error() const {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t status = ncclCommGetAsyncError(comm_, &state);
    if (status == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) {
      return std::nullopt;
    }
    return message("rank ", members()[rank()], ": communicator \"", name(),
                   "\" failed: ", ncclGetErrorString(status == ncclSuccess ? state : status), " (",
                   ncclGetLastError(comm_), ")");
  }
  void abort() {
    if (!aborted_.exchange(true))
      ncclCommAbort(comm_);
  }

  /// One collective: refused after a failure, watched from before it is issued until the stream has
  /// passed it.
  template <typename F>
  void issue(const char* kind, Stream& stream, F&& call) {
    watchdog_.check();
    const std::string what = describe(kind);
    CudaWatch watch(watchdog_, stream,
                    message(what, " did not finish within its deadline (ROWSHARD_COMM_TIMEOUT)"));
    const ncclResult_t status = call(native(stream));
    watchdog_.check();  // an aborted call returns an error of no interest
    nccl_check(status, what);
    watch.issued();
  }

  void start_all_gather(const View& out, const ConstView& in, Stream& stream) override {
    issue("all_gather", stream, [&](cudaStream_t s) {
      return ncclAllGather(in.data, out.data, static_cast<size_t>(in.bytes()), ncclUint8, comm_, s);
    });
  }
  void start_all_gather_v(const View& out, const ConstView& in, std::span<const int64_t> counts,
                          Stream& stream) override {
    issue("all_gather_v", stream, [&](cudaStream_t s) {
      ncclResult_t result = ncclGroupStart();
      std::byte* part = out.byte_data();
      for (int root = 0; root < size(); ++root) {
        const int64_t bytes = counts[root] * size_of(out.dtype);
        if (bytes > 0 && result == ncclSuccess) {
          result = ncclBroadcast(root == rank() ? in.data : part, part, static_cast<size_t>(bytes),
                                 ncclUint8, root, comm_, s);
        }
        part += bytes;
      }
      const ncclResult_t end = ncclGroupEnd();
      return result == ncclSuccess ? end : result;
    });
  }
  void start_reduce_scatter(const View& out, const ConstView& in, Reduction reduction,
                            Stream& stream) override {
    issue("reduce_scatter", stream, [&](cudaStream_t s) {
      return ncclReduceScatter(in.data, out.data, static_cast<size_t>(out.elements()),
                               nccl_type(in.dtype), nccl_operation(reduction), comm_, s);
    });
  }
  void start_all_reduce(const View& inout, Reduction reduction, Stream& stream) override {
    issue("all_reduce", stream, [&](cudaStream_t s) {
      return ncclAllReduce(inout.data, inout.data, static_cast<size_t>(inout.elements()),
                           nccl_type(inout.dtype), nccl_operation(reduction), comm_, s);
    });
  }
  void start_broadcast(const View& inout, int root, Stream& stream) override {
    issue("broadcast", stream, [&](cudaStream_t s) {
      return ncclBroadcast(inout.data, inout.data, static_cast<size_t>(inout.bytes()), ncclUint8,
                           root, comm_, s);
    });
  }
  void start_exchange(std::span<const ConstView> send, int to, std::span<const View> receive,
                      int from, Stream& stream) override {
    if (peer_exchange(stream)) {
      issue("exchange", stream, [&](cudaStream_t) {
        mailbox_->exchange(send, to, receive, from, stream);
        return ncclSuccess;
      });
      return;
    }
    issue("exchange", stream, [&](cudaStream_t s) {
      ncclResult_t result = ncclGroupStart();
      for (const ConstView& view : send) {
        if (result == ncclSuccess && view.bytes() > 0)
          result = ncclSend(view.data, static_cast<size_t>(view.bytes()), ncclUint8, to, comm_, s);
      }
      for (const View& view : receive) {
        if (result == ncclSuccess && view.bytes() > 0)
          result =
              ncclRecv(view.data, static_cast<size_t>(view.bytes()), ncclUint8, from, comm_, s);
      }
      const ncclResult_t end = ncclGroupEnd();
      return result == ncclSuccess ? end : result;
    });
  }
  void start_barrier() override {
    watchdog_.check();
    host_->barrier();
  }
  /// Whether exchanges go by the copy engines. The first one asks, on all ranks.
  bool peer_exchange(const Stream& stream) {
    if (!peer_ || stream.capturing())
      return false;
    if (!mailbox_) {
      auto mailbox = std::make_unique<PeerMailbox>(device(), *host_);
      peer_ = mailbox->failure().empty();
      if (!peer_) {
        log_once(message("peer ", name()),
                 message("communicator \"", name(), "\" (", rank_list(members()),
                         ") exchanges over NCCL, which takes multiprocessors from the GEMMs: ",
                         mailbox->failure()));
        return false;
      }
      mailbox_ = std::move(mailbox);
      abort_mailbox_ = watchdog_.add_abort([this] { mailbox_->abort(); });
    }
    return true;
  }
  std::unique_ptr<FixedPart> start_fix(const ConstView& part, std::vector<ByteRange> own) override {
    if (peer_ && part.bytes() > 0) {
      std::string why_not;
      if (auto fixed = fix_peer_part(part, own, *host_, why_not))
        return fixed;
      log_once(
          message("peer ", name()),
          message("communicator \"", name(), "\" (", rank_list(members()),
                  ") gathers over NCCL, which takes multiprocessors from the GEMMs: ", why_not));
      peer_ = false;
    }
    return std::make_unique<FixedPart>(part, std::move(own));
  }
  void start_fixed_all_gather(const View& out, const FixedPart& part, Stream& stream) override {
    // Nobody else takes part, so nothing can be late; a failed job must still stop here.
    watchdog_.check();
    if (!gather_from_peers(out, part, stream))
      start_all_gather(out, part.part(), stream);
  }

  std::unique_ptr<Communicator> host_;
  Watchdog& watchdog_;
  std::shared_ptr<NcclPool> pool_;
  bool peer_;
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> aborted_{false};
  int probe_ = 0;
  int abort_ = 0;
  int abort_mailbox_ = 0;
  std::unique_ptr<PeerMailbox> mailbox_;
};

}  // namespace

std::shared_ptr<NcclPool> make_nccl_pool() {
  return std::make_shared<NcclPool>();
}

void empty_nccl_pool(NcclPool& pool, bool abort) {
  pool.empty(abort);
}

std::unique_ptr<Communicator> make_nccl_communicator(const Group& group, Device device,
                                                     std::unique_ptr<Communicator> host,
                                                     NcclOptions options) {
  return std::make_unique<NcclCommunicator>(group, device, std::move(host), std::move(options));
}

}  // namespace rowshard

#endif
