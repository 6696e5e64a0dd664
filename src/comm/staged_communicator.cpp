#include "comm/backends.h"

#if ROWSHARD_CUDA

#include "comm/host_engine.h"
#include "comm/watchdog.h"
#include "core/cuda_check.h"
#include "core/log.h"

namespace rowshard {
namespace {

/// Pinned host memory that grows to the largest size asked for.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer() { cudaFreeHost(data_); }

  View view(const ConstView& like) {
    if (like.bytes() > bytes_) {
      CUDA_CHECK(cudaFreeHost(data_));
      data_ = nullptr;
      bytes_ = 0;
      CUDA_CHECK(cudaMallocHost(&data_, static_cast<size_t>(like.bytes())));
      bytes_ = like.bytes();
    }
    return View(data_, like.dtype, like.shape, kHost);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

class StagedCommunicator : public Communicator {
 public:
  StagedCommunicator(const Group& group, Device device, std::unique_ptr<Communicator> host,
                     bool peer)
      : Communicator(group.name, group.members, group.rank, device),
        host_(std::move(host)),
        peer_(peer) {}

 private:
  View take(PinnedBuffer& buffer, const ConstView& from, Stream& stream) {
    ROWSHARD_CHECK(!stream.capturing(), LogicError, describe("staged collective"),
                   ": cannot be captured in a CUDA graph; use the nccl transport");
    const View staged = buffer.view(from);
    copy(staged, from, stream);
    stream.synchronize();
    return staged;
  }
  static void give(const View& to, const View& staged, Stream& stream) {
    copy(to, staged, stream);
    stream.synchronize();  // the buffer is free for the next collective
  }

  void start_all_gather(const View& out, const ConstView& in, Stream& stream) override {
    const View from = take(in_, in, stream);
    const View to = out_.view(out);
    host_->all_gather(to, from, host_stream_);
    give(out, to, stream);
  }
  void start_all_gather_v(const View& out, const ConstView& in, std::span<const int64_t> counts,
                          Stream& stream) override {
    const View from = take(in_, in, stream);
    const View to = out_.view(out);
    host_->all_gather_v(to, from, counts, host_stream_);
    give(out, to, stream);
  }
  void start_reduce_scatter(const View& out, const ConstView& in, Reduction reduction,
                            Stream& stream) override {
    const View from = take(in_, in, stream);
    const View to = out_.view(out);
    host_->reduce_scatter(to, from, reduction, host_stream_);
    give(out, to, stream);
  }
  void start_all_reduce(const View& inout, Reduction reduction, Stream& stream) override {
    const View staged = take(in_, inout, stream);
    host_->all_reduce(staged, reduction, host_stream_);
    give(inout, staged, stream);
  }
  void start_broadcast(const View& inout, int root, Stream& stream) override {
    const View staged = take(in_, inout, stream);
    host_->broadcast(staged, root, host_stream_);
    give(inout, staged, stream);
  }
  /// By the copy engines where the ranks can open each other's memory, which ranks of one GPU can:
  /// the way of several GPUs, and the only one that one GPU can show.
  void start_exchange(std::span<const ConstView> send, int to, std::span<const View> receive,
                      int from, Stream& stream) override {
    if (mailbox_failed_) {
      staged_exchange(send, to, receive, from, stream);
      return;
    }
    ROWSHARD_CHECK(!stream.capturing(), LogicError, describe("exchange"),
                   ": cannot be captured in a CUDA graph; use the nccl transport");
    if (!mailbox_) {
      mailbox_ = std::make_unique<PeerMailbox>(device(), *host_);
      if (!mailbox_->failure().empty()) {
        log_once(message("peer ", name()),
                 message("communicator \"", name(), "\" exchanges through ",
                         "the host: ", mailbox_->failure()));
        mailbox_.reset();
        mailbox_failed_ = true;
        return start_exchange(send, to, receive, from, stream);
      }
    }
    mailbox_->exchange(send, to, receive, from, stream);
    // Nobody watches this stream: a peer that is gone must not leave it waiting.
    Event done(device());
    done.record(stream);
    const Deadline deadline(comm_timeout_seconds());
    Backoff backoff;
    while (cudaEventQuery(static_cast<cudaEvent_t>(done.native())) == cudaErrorNotReady) {
      if (deadline.passed()) {
        mailbox_->abort();
        mailbox_->abandon();
        throw CommTimeout(message(describe("exchange"), ": rank ", members()[from], " or ",
                                  members()[to], " did not take part within ", deadline.seconds(),
                                  " s"));
      }
      backoff.pause();
    }
  }
  void staged_exchange(std::span<const ConstView> send, int to, std::span<const View> receive,
                       int from, Stream& stream) {
    for (size_t i = 0; i < send.size(); ++i) {  // one pinned buffer a direction
      const ConstView out = take(in_, send[i], stream);
      const View in = out_.view(receive[i]);
      host_->exchange({&out, 1}, to, {&in, 1}, from, host_stream_);
      give(receive[i], in, stream);
    }
  }
  void start_barrier() override { host_->barrier(); }
  std::unique_ptr<FixedPart> start_fix(const ConstView& part, std::vector<ByteRange> own) override {
    if (peer_ && part.bytes() > 0) {
      std::string why_not;
      if (auto fixed = fix_peer_part(part, own, *host_, why_not))
        return fixed;
      log_once(message("peer ", name()),
               message("communicator \"", name(), "\" (", rank_list(members()),
                       ") gathers through host memory: ", why_not));
      peer_ = false;
    }
    return std::make_unique<FixedPart>(part, std::move(own));
  }
  void start_fixed_all_gather(const View& out, const FixedPart& part, Stream& stream) override {
    if (!gather_from_peers(out, part, stream))
      start_all_gather(out, part.part(), stream);
  }

  std::unique_ptr<Communicator> host_;
  bool peer_;
  Stream host_stream_{kHost};  // "compute": collectives on it are finished when they return
  PinnedBuffer in_;
  PinnedBuffer out_;
  std::unique_ptr<PeerMailbox> mailbox_;  // made at the first exchange
  bool mailbox_failed_ = false;
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(const Group& group, Device device,
                                                       std::unique_ptr<Communicator> host,
                                                       bool peer) {
  return std::make_unique<StagedCommunicator>(group, device, std::move(host), peer);
}

}  // namespace rowshard

#endif
