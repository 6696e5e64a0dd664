// Non-blocking operations made of messages and steps, and the engine that moves all of them.
//
// An operation posts messages; when all of them are through, its next step runs, which may compute
// and post more. Whoever waits for one operation moves every other one too, so two ranks that wait
// for different operations never wait for each other.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport.h"
#include "comm/watchdog.h"
#include "core/device.h"

namespace rowshard {

class HostEngine;

class HostOperation : public Pending {
 public:
  /// `what` names the operation in messages: `all_reduce #17 on "reduce"`.
  HostOperation(HostEngine& engine, int channel, int64_t sequence, std::string what)
      : engine_(engine), channel_(channel), sequence_(sequence), what_(std::move(what)) {}

  /// Empty messages are not sent: both sides know the size. `peer` is a rank of the world.
  void send(int peer, const std::byte* data, int64_t bytes);
  void receive(int peer, std::byte* data, int64_t bytes);
  /// Runs when every message posted so far is through, and every step before this one.
  void then(std::function<void()> step) { steps_.push_back(std::move(step)); }
  void finish() override;

 private:
  friend class HostEngine;
  struct Message {
    int peer;
    bool sending;
    std::unique_ptr<Transfer> transfer;  // null once through
  };
  bool advance();
  /// "rank(s) 2, 3 have sent nothing".
  std::string waiting_for() const;

  HostEngine& engine_;
  int channel_;
  int64_t sequence_;
  std::string what_;
  std::vector<Message> messages_;
  std::list<std::function<void()>> steps_;
  bool done_ = false;
};

class HostEngine {
 public:
  HostEngine(std::unique_ptr<Transport> transport, double timeout)
      : transport_(std::move(transport)), timeout_(timeout) {}

  Transport& transport() { return *transport_; }
  double timeout() const { return timeout_; }
  /// Keeps the operation until it is done, even if nobody waits for it.
  void start(std::shared_ptr<HostOperation> operation);
  /// Moves everything until `operation` is done. Throws CommTimeout at the deadline, and CommError
  /// when a peer failed or an earlier wait did.
  void wait(HostOperation& operation);

 private:
  void poll();

  std::unique_ptr<Transport> transport_;
  double timeout_;
  std::list<std::shared_ptr<HostOperation>> active_;
  std::string failure_;
};

/// "rank 2", "ranks 2, 5".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace rowshard
