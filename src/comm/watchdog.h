// The deadline of every collective, and what happens when it passes.
//
// On the host whoever waits polls, and throws when the deadline passes. On cuda the host may be
// blocked in a stream, so the Watchdog's own thread looks for what is late or has failed, aborts
// the communicators (which lets the stream go on, with undefined data) and remembers the failure;
// `check`, which every collective and barrier calls first, throws it.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/error.h"

namespace rowshard {

/// The job cannot go on: a peer ended, a connection broke, NCCL failed.
class CommError : public Error {
 public:
  using Error::Error;
};
/// A collective did not finish inside the deadline. Names the collective and the ranks waited for.
class CommTimeout : public CommError {
 public:
  using CommError::CommError;
};

/// Seconds a collective may wait for its peers: ROWSHARD_COMM_TIMEOUT, default 300.
double comm_timeout_seconds();

/// A point in time; `seconds` from now.
class Deadline {
 public:
  explicit Deadline(double seconds);
  bool passed() const;
  double seconds() const { return seconds_; }
  double remaining() const;  // 0 once passed

 private:
  double seconds_;
  double end_;
};

/// Lets other processes run between two polls: yields at first, then sleeps briefly.
class Backoff {
 public:
  void pause();

 private:
  int polls_ = 0;
};

/// A thread that polls. Thread-safe. Starts with the first `watch` or `add_probe`.
class Watchdog {
 public:
  explicit Watchdog(double timeout_seconds);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// `done` is polled until true; past the deadline the job has failed with CommTimeout and the
  /// text of `describe`, which is asked only then. Callbacks must not call back into the watchdog.
  void watch(std::function<std::string()> describe, std::function<bool()> done);
  /// Polled for as long as the token lives: an answer means the job has failed with CommError.
  int add_probe(std::function<std::optional<std::string>()> probe);
  /// Called once, on the watchdog's thread, when the job has failed.
  int add_abort(std::function<void()> abort);
  /// Forgets a probe or an abort; returns once neither is running.
  void remove(int token);
  /// Blocks until nothing is watched any more, or the job has failed.
  void drain();

  bool failed() const;
  /// Throws what failed. After a timeout the first caller also asks `explain`, on its own thread,
  /// what the ranks know of each other, and adds the answer to the message.
  void check();
  void set_explain(std::function<std::string()> explain);
  /// Fails the job from outside: aborts run, `check` throws from now on.
  void fail(const std::string& why);

 private:
  struct Watched {
    std::function<std::string()> describe;
    std::function<bool()> done;
    Deadline deadline;
  };
  template <typename F>
  struct Hook {
    int token;
    F call;
  };
  void run();
  void poll();
  void start();
  void set_failure(std::string why, bool timeout);

  const double timeout_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::list<Watched> watched_;
  std::list<Hook<std::function<std::optional<std::string>()>>> probes_;
  std::list<Hook<std::function<void()>>> aborts_;
  int next_token_ = 1;
  bool stop_ = false;
  bool failed_ = false;
  bool timed_out_ = false;
  std::string failure_;
  std::function<std::string()> explain_;
  std::thread thread_;
};

}  // namespace rowshard
