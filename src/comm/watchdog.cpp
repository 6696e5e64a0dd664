#include "comm/watchdog.h"

#include <sched.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <utility>

#include "core/device.h"
#include "core/environment.h"

namespace rowshard {
namespace {

constexpr double kDefaultTimeout = 300;
constexpr int kYields = 200;
constexpr std::chrono::microseconds kSleep{50};
constexpr std::chrono::milliseconds kWatchPeriod{20};

}  // namespace

double comm_timeout_seconds() {
  const auto text = environment("ROWSHARD_COMM_TIMEOUT");
  if (!text)
    return kDefaultTimeout;
  double seconds = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  ROWSHARD_CHECK(error == std::errc{} && end == text->data() + text->size() && seconds > 0 &&
                     std::isfinite(seconds),
                 ConfigError, "ROWSHARD_COMM_TIMEOUT=", *text, " is no number of seconds above 0");
  return seconds;
}

Deadline::Deadline(double seconds) : seconds_(seconds), end_(now_seconds() + seconds) {}

bool Deadline::passed() const {
  return now_seconds() >= end_;
}

double Deadline::remaining() const {
  return std::max(0.0, end_ - now_seconds());
}

void Backoff::pause() {
  if (++polls_ < kYields) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(kSleep);
  }
}

Watchdog::Watchdog(double timeout_seconds) : timeout_(timeout_seconds) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable())
    thread_.join();
}

void Watchdog::start() {
  if (!thread_.joinable())
    thread_ = std::thread([this] { run(); });
  wake_.notify_all();
}

void Watchdog::watch(std::function<std::string()> describe, std::function<bool()> done) {
  std::lock_guard lock(mutex_);
  watched_.push_back({std::move(describe), std::move(done), Deadline(timeout_)});
  start();
}

int Watchdog::add_probe(std::function<std::optional<std::string>()> probe) {
  std::lock_guard lock(mutex_);
  probes_.push_back({next_token_, std::move(probe)});
  start();
  return next_token_++;
}

int Watchdog::add_abort(std::function<void()> abort) {
  std::lock_guard lock(mutex_);
  aborts_.push_back({next_token_, std::move(abort)});
  return next_token_++;
}

void Watchdog::remove(int token) {
  // Hooks run under the mutex: holding it means that none is running.
  std::lock_guard lock(mutex_);
  probes_.remove_if([&](const auto& hook) { return hook.token == token; });
  aborts_.remove_if([&](const auto& hook) { return hook.token == token; });
}

void Watchdog::drain() {
  Backoff backoff;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (watched_.empty() || failed_)
        return;
    }
    backoff.pause();
  }
}

bool Watchdog::failed() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

void Watchdog::set_explain(std::function<std::string()> explain) {
  std::lock_guard lock(mutex_);
  explain_ = std::move(explain);
}

void Watchdog::check() {
  std::lock_guard lock(mutex_);
  if (!failed_)
    return;
  if (timed_out_ && explain_)
    failure_ += std::exchange(explain_, nullptr)();
  if (timed_out_)
    throw CommTimeout(failure_);
  throw CommError(failure_);
}

void Watchdog::fail(const std::string& why) {
  std::lock_guard lock(mutex_);
  set_failure(why, false);
}

void Watchdog::set_failure(std::string why, bool timeout) {
  if (failed_)
    return;
  failed_ = true;
  timed_out_ = timeout;
  failure_ = std::move(why);
  watched_.clear();
  for (auto& hook : aborts_)
    hook.call();
}

void Watchdog::poll() {
  if (failed_)
    return;
  for (auto& hook : probes_) {
    if (auto why = hook.call())
      return set_failure(std::move(*why), false);
  }
  for (auto item = watched_.begin(); item != watched_.end();) {
    if (item->done()) {
      item = watched_.erase(item);
    } else if (item->deadline.passed()) {
      return set_failure(item->describe(), true);
    } else {
      ++item;
    }
  }
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    try {
      poll();
    } catch (const std::exception& error) {
      set_failure(error.what(), false);
    }
    const bool idle = (watched_.empty() && probes_.empty()) || failed_;
    if (idle) {
      wake_.wait(lock);
    } else {
      wake_.wait_for(lock, kWatchPeriod);
    }
  }
}

}  // namespace rowshard
