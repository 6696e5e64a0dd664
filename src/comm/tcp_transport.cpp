#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "comm/tcp_rendezvous.h"
#include "comm/transport.h"

namespace rowshard {
namespace {

constexpr int kNoticeChannel = -1;  // the payload says why the sender has failed
constexpr int kNoticeBytes = 1024;
constexpr double kNoticeSeconds = 1;

struct Header {
  int64_t bytes;
  int64_t sequence;
  int32_t channel;
  int32_t unused;
};

struct Outgoing {
  Header header;
  const std::byte* data;
  int64_t sent = 0;  // header and payload together
  bool done = false;
};

struct Incoming {
  std::byte* data = nullptr;
  std::vector<std::byte> own;  // where nobody has asked for it yet
  int64_t bytes = 0;
  int64_t sequence = 0;
  int64_t received = 0;
  bool done = false;
};

struct Peer {
  Socket socket;
  bool closed = false;
  std::deque<std::shared_ptr<Outgoing>> sends;
  std::map<int, std::deque<std::shared_ptr<Incoming>>> expected;    // by channel
  std::map<int, std::deque<std::shared_ptr<Incoming>>> unexpected;  // by channel
  Header header{};
  size_t header_bytes = 0;
  std::shared_ptr<Incoming> current;
};

class TcpTransport : public Transport {
 public:
  TcpTransport(int rank, std::vector<Socket> sockets)
      : Transport(rank, static_cast<int>(sockets.size())), peers_(sockets.size()) {
    for (size_t i = 0; i < sockets.size(); ++i)
      peers_[i].socket = std::move(sockets[i]);
  }

  std::unique_ptr<Transfer> send(int peer, int channel, int64_t sequence, const std::byte* data,
                                 int64_t bytes) override {
    auto message = std::make_shared<Outgoing>(Outgoing{{bytes, sequence, channel, 0}, data});
    peers_[peer].sends.push_back(message);
    return std::make_unique<SendTransfer>(*this, peer, std::move(message));
  }

  std::unique_ptr<Transfer> receive(int peer, int channel, int64_t sequence, std::byte* data,
                                    int64_t bytes) override {
    auto& waiting = peers_[peer].unexpected[channel];
    std::shared_ptr<Incoming> message;
    if (!waiting.empty()) {
      message = std::move(waiting.front());
      waiting.pop_front();
      check_fits(peer, *message, sequence, bytes);
    } else {
      message = std::make_shared<Incoming>();
      message->data = data;
      message->bytes = bytes;
      message->sequence = sequence;
      peers_[peer].expected[channel].push_back(message);
    }
    return std::make_unique<ReceiveTransfer>(*this, peer, std::move(message), data);
  }

  void check_peers() override {
    progress();
    if (!peer_failure_.empty())
      throw CommError(peer_failure_);
  }

  void abort(const std::string& why) override {
    const std::string text =
        (peer_failure_.empty() ? notice(why) : peer_failure_).substr(0, kNoticeBytes);
    const Header header{static_cast<int64_t>(text.size()), 0, kNoticeChannel, 0};
    const Deadline deadline(kNoticeSeconds);
    for (Peer& peer : peers_) {
      if (!peer.socket || peer.closed)
        continue;
      // Half a message on the line would swallow the notice: then only the closing tells.
      const bool mid_message = !peer.sends.empty() && peer.sends.front()->sent > 0;
      if (!mid_message) {
        peer.socket.write(&header, sizeof(header), deadline);
        peer.socket.write(text.data(), text.size(), deadline);
      }
      shutdown(peer.socket.fd(), SHUT_WR);  // what was written still arrives
      peer.closed = true;
    }
  }

  std::optional<std::string> lost_peer() const override {
    for (int index = 0; index < size(); ++index) {
      if (index == rank())
        continue;
      if (peers_[index].socket.hung_up())
        return closed_connection(index);
    }
    return std::nullopt;
  }

  void close() override {
    for (Peer& peer : peers_)
      peer.socket.close();
  }

 private:
  class SendTransfer : public Transfer {
   public:
    SendTransfer(TcpTransport& transport, int peer, std::shared_ptr<Outgoing> message)
        : transport_(transport), peer_(peer), message_(std::move(message)) {}
    bool test() override {
      if (!message_->done)
        transport_.progress_peer(peer_);
      if (!message_->done)
        transport_.check_open(peer_);
      return message_->done;
    }

   private:
    TcpTransport& transport_;
    int peer_;
    std::shared_ptr<Outgoing> message_;
  };

  class ReceiveTransfer : public Transfer {
   public:
    ReceiveTransfer(TcpTransport& transport, int peer, std::shared_ptr<Incoming> message,
                    std::byte* data)
        : transport_(transport), peer_(peer), message_(std::move(message)), data_(data) {}
    ~ReceiveTransfer() override {
      // Only after a failure: memory that is about to go away must not be written any more.
      if (!message_->done)
        transport_.peers_[peer_].closed = true;
    }
    bool test() override {
      if (!message_->done)
        transport_.progress_peer(peer_);
      if (!message_->done)
        transport_.check_open(peer_);
      if (message_->done && message_->data != data_) {
        std::memcpy(data_, message_->own.data(), message_->own.size());
      }
      return message_->done;
    }

   private:
    TcpTransport& transport_;
    int peer_;
    std::shared_ptr<Incoming> message_;
    std::byte* data_;
  };

  void check_fits(int peer, const Incoming& got, int64_t sequence, int64_t bytes) const {
    ROWSHARD_CHECK(got.sequence == sequence && got.bytes == bytes, CommError, "rank ", peer,
                   " sent ", got.bytes, " bytes as its collective #", got.sequence, " where ",
                   bytes, " bytes of #", sequence,
                   " are due: ranks issue different collectives, or with other shapes");
  }

  void check_open(int peer) {
    if (peers_[peer].closed)
      progress();  // another rank may have said why
    if (!peer_failure_.empty())
      throw CommError(peer_failure_);
    ROWSHARD_CHECK(!peers_[peer].closed, CommError, closed_connection(peer));
  }

  static std::string closed_connection(int peer) {
    return message("rank ", peer, " closed its connection: it died or gave up");
  }

  void progress() {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank())
        progress_peer(peer);
    }
  }

  void progress_peer(int index) {
    Peer& peer = peers_[index];
    while (!peer.closed && write_some(peer)) {
    }
    while (!peer.closed && read_some(index, peer)) {
    }
  }

  /// True while there is more to write and the socket takes it.
  static bool write_some(Peer& peer) {
    if (peer.sends.empty())
      return false;
    Outgoing& message = *peer.sends.front();
    const int64_t head = sizeof(Header);
    const bool in_header = message.sent < head;
    const std::byte* from = in_header
                                ? reinterpret_cast<const std::byte*>(&message.header) + message.sent
                                : message.data + (message.sent - head);
    const int64_t left = (in_header ? head : head + message.header.bytes) - message.sent;
    const ssize_t put = ::send(peer.socket.fd(), from, static_cast<size_t>(left), MSG_NOSIGNAL);
    if (put < 0)
      return blocked_or_closed(peer);
    message.sent += put;
    if (message.sent == head + message.header.bytes) {
      message.done = true;
      peer.sends.pop_front();
    }
    return true;
  }

  bool read_some(int index, Peer& peer) {
    if (!peer.current) {
      const ssize_t got =
          recv(peer.socket.fd(), reinterpret_cast<std::byte*>(&peer.header) + peer.header_bytes,
               sizeof(Header) - peer.header_bytes, 0);
      if (got <= 0)
        return got == 0 ? !(peer.closed = true) : blocked_or_closed(peer);
      peer.header_bytes += static_cast<size_t>(got);
      if (peer.header_bytes == sizeof(Header))
        begin_message(index, peer);
      return true;
    }
    Incoming& message = *peer.current;
    const ssize_t got = recv(peer.socket.fd(), message.data + message.received,
                             static_cast<size_t>(message.bytes - message.received), 0);
    if (got <= 0)
      return got == 0 ? !(peer.closed = true) : blocked_or_closed(peer);
    message.received += got;
    if (message.received == message.bytes) {
      message.done = true;
      if (peer.header.channel == kNoticeChannel) {
        peer_failure_.assign(reinterpret_cast<const char*>(message.own.data()), message.own.size());
      }
      peer.current.reset();
      peer.header_bytes = 0;
    }
    return true;
  }

  void begin_message(int index, Peer& peer) {
    const Header& header = peer.header;
    auto& expected = peer.expected[header.channel];
    if (!expected.empty()) {
      peer.current = std::move(expected.front());
      expected.pop_front();
      Incoming got;
      got.bytes = header.bytes;
      got.sequence = header.sequence;
      check_fits(index, got, peer.current->sequence, peer.current->bytes);
      return;
    }
    peer.current = std::make_shared<Incoming>();
    peer.current->bytes = header.bytes;
    peer.current->sequence = header.sequence;
    peer.current->own.resize(static_cast<size_t>(header.bytes));
    peer.current->data = peer.current->own.data();
    if (header.channel != kNoticeChannel)
      peer.unexpected[header.channel].push_back(peer.current);
  }

  /// Nothing to do now (false), or the connection is gone.
  static bool blocked_or_closed(Peer& peer) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
      peer.closed = true;
    return false;
  }

  std::vector<Peer> peers_;
  std::string peer_failure_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(const LaunchEnvironment& launch, double timeout) {
  return std::make_unique<TcpTransport>(launch.rank, tcp_rendezvous(launch, timeout));
}

}  // namespace rowshard
