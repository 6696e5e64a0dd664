#include "comm/host_engine.h"

#include <algorithm>

namespace rowshard {

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

void HostOperation::send(int peer, const std::byte* data, int64_t bytes) {
  if (bytes == 0)
    return;
  messages_.push_back(
      {peer, true, engine_.transport().send(peer, channel_, sequence_, data, bytes)});
}

void HostOperation::receive(int peer, std::byte* data, int64_t bytes) {
  if (bytes == 0)
    return;
  messages_.push_back(
      {peer, false, engine_.transport().receive(peer, channel_, sequence_, data, bytes)});
}

void HostOperation::finish() {
  engine_.wait(*this);
}

bool HostOperation::advance() {
  while (!done_) {
    for (Message& message : messages_) {
      if (message.transfer && message.transfer->test())
        message.transfer.reset();
    }
    std::erase_if(messages_, [](const Message& message) { return !message.transfer; });
    if (!messages_.empty())
      return false;
    if (steps_.empty()) {
      done_ = true;
    } else {
      auto step = std::move(steps_.front());
      steps_.pop_front();
      step();
    }
  }
  return true;
}

std::string HostOperation::waiting_for() const {
  std::vector<int> silent;
  std::vector<int> deaf;
  for (const Message& message : messages_) {
    if (message.transfer)
      (message.sending ? deaf : silent).push_back(message.peer);
  }
  if (!silent.empty())
    return rank_list(silent) + " did not take part";
  return rank_list(deaf) + " took nothing";
}

void HostEngine::start(std::shared_ptr<HostOperation> operation) {
  ROWSHARD_CHECK(failure_.empty(), CommError, failure_);
  active_.push_back(std::move(operation));
  transport_->check_peers();  // lets bytes leave now
}

void HostEngine::poll() {
  for (auto it = active_.begin(); it != active_.end();) {
    it = (*it)->advance() ? active_.erase(it) : std::next(it);
  }
  transport_->check_peers();
}

void HostEngine::wait(HostOperation& operation) {
  if (operation.done_)
    return;
  ROWSHARD_CHECK(failure_.empty(), CommError, failure_);
  const Deadline deadline(timeout_);
  Backoff backoff;
  try {
    for (;;) {
      poll();
      if (operation.done_)
        return;
      if (deadline.passed()) {
        throw CommTimeout(message(operation.what_, ": ", operation.waiting_for(), " within ",
                                  timeout_, " s, dead, stuck or issuing other collectives; ",
                                  "ROWSHARD_COMM_TIMEOUT sets the limit"));
      }
      backoff.pause();
    }
  } catch (const Error& error) {
    failure_ = error.what();
    throw;
  }
}

}  // namespace rowshard
