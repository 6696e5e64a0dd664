#include "comm/bootstrap.h"

#include "comm/host_engine.h"

namespace rowshard {
namespace {

constexpr int kChannel = 0;
constexpr int kSurveyChannel = 1;
constexpr int64_t kSurveyBytes = 512;

class SelfTransport : public Transport {
 public:
  SelfTransport() : Transport(0, 1) {}
  std::unique_ptr<Transfer> send(int, int, int64_t, const std::byte*, int64_t) override {
    throw LogicError("one rank sends to nobody");
  }
  std::unique_ptr<Transfer> receive(int, int, int64_t, std::byte*, int64_t) override {
    throw LogicError("one rank receives from nobody");
  }
  void check_peers() override {}
  void abort(const std::string&) override {}
  void close() override {}
};

}  // namespace

std::unique_ptr<Transport> make_self_transport() {
  return std::make_unique<SelfTransport>();
}

std::unique_ptr<Bootstrap> Bootstrap::create(const LaunchEnvironment& launch) {
  const double timeout = comm_timeout_seconds();
  std::unique_ptr<Transport> transport;
  if (uses_mpi(launch.launcher)) {
    transport = make_mpi_transport(launch, timeout);
  } else if (launch.world_size > 1) {
    transport = make_tcp_transport(launch, timeout);
  } else {
    transport = make_self_transport();
  }
  return std::unique_ptr<Bootstrap>(
      new Bootstrap(std::make_unique<HostEngine>(std::move(transport), timeout)));
}

Bootstrap::Bootstrap(std::unique_ptr<HostEngine> engine) : engine_(std::move(engine)) {}

Bootstrap::~Bootstrap() {
  if (abandoned_)
    return;
  try {
    barrier();
    engine_->transport().close();
  } catch (const std::exception&) {
    // A peer is gone: there is nothing to wait for, and a destructor must not throw.
  }
}

int Bootstrap::rank() const {
  return engine_->transport().rank();
}
int Bootstrap::size() const {
  return engine_->transport().size();
}

std::vector<Bytes> Bootstrap::all_gather(std::span<const std::byte> bytes) {
  std::vector<Bytes> all(size());
  all[rank()].assign(bytes.begin(), bytes.end());
  std::vector<int64_t> lengths(size());
  lengths[rank()] = static_cast<int64_t>(bytes.size());
  const auto raw = [](int64_t& value) { return reinterpret_cast<std::byte*>(&value); };

  auto operation = std::make_shared<HostOperation>(
      *engine_, kChannel, sequence_,
      message("rank ", rank(), ": exchange #", sequence_, " between all ", size(), " ranks"));
  ++sequence_;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank())
      continue;
    operation->send(peer, raw(lengths[rank()]), sizeof(int64_t));
    operation->receive(peer, raw(lengths[peer]), sizeof(int64_t));
  }
  HostOperation* op = operation.get();  // the step is the operation's own: no cycle
  operation->then([&, op] {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank())
        continue;
      all[peer].resize(lengths[peer]);
      op->send(peer, all[rank()].data(), lengths[rank()]);
      op->receive(peer, all[peer].data(), lengths[peer]);
    }
  });
  engine_->start(operation);
  operation->finish();
  return all;
}

std::vector<std::string> Bootstrap::all_gather(const std::string& text) {
  std::vector<std::string> texts;
  for (const Bytes& bytes : all_gather(std::as_bytes(std::span(text)))) {
    texts.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return texts;
}

Bytes Bootstrap::broadcast(std::span<const std::byte> bytes, int root) {
  if (rank() != root)
    bytes = {};
  return all_gather(bytes)[root];
}

void Bootstrap::barrier() {
  all_gather(std::span<const std::byte>{});
}

std::vector<std::optional<std::string>> Bootstrap::survey(const std::string& text, double seconds) {
  Transport& transport = engine_->transport();
  std::vector<std::string> answers(size(), std::string(kSurveyBytes, '\0'));
  answers[rank()] = text;
  answers[rank()].resize(kSurveyBytes);
  std::vector<std::unique_ptr<Transfer>> sends;
  std::vector<std::unique_ptr<Transfer>> receives(size());
  const auto raw = [&](int peer) { return reinterpret_cast<std::byte*>(answers[peer].data()); };
  std::vector<std::optional<std::string>> result(size());
  result[rank()] = text;
  int silent = size() - 1;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank())
      continue;
    sends.push_back(transport.send(peer, kSurveyChannel, 0, raw(rank()), kSurveyBytes));
    receives[peer] = transport.receive(peer, kSurveyChannel, 0, raw(peer), kSurveyBytes);
  }
  const auto through = [](Transfer& transfer) {
    try {
      return transfer.test();
    } catch (const CommError&) {  // gone: it will not answer
      return false;
    }
  };
  const Deadline deadline(seconds);
  for (Backoff backoff; silent > 0 && !deadline.passed(); backoff.pause()) {
    for (auto& send : sends) {
      if (send && through(*send))
        send.reset();
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (!receives[peer] || !through(*receives[peer]))
        continue;
      receives[peer].reset();
      result[peer] = answers[peer].c_str();
      --silent;
    }
  }
  return result;
}

std::optional<std::string> Bootstrap::lost_peer() const {
  return engine_->transport().lost_peer();
}

void Bootstrap::abort(const std::string& why) {
  abandoned_ = true;
  engine_->transport().abort(why);
}

void Bootstrap::abandon() {
  abandoned_ = true;
}

}  // namespace rowshard
