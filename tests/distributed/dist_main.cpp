// GoogleTest main for multi-rank tests: `--device host|cuda [--comm peer|nccl|staged|peer-staged]`.
//
// Rank 0 prints as usual, the others only their failures, with their rank. A test that runs longer
// than its timer ends the job: a hang is a failure. All ranks exit with the same code: 0, 1, or 77
// for a skip, whose reason is printed.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>

#include "core/environment.h"
#include "distributed/dist_fixture.h"

namespace rowshard::testing {

World* test_world = nullptr;

namespace {

constexpr int kDefaultTestSeconds = 60;
constexpr int kSkipped = 77;

/// Ends the process from a thread of its own when a test outlives its time.
class TestTimer : public ::testing::EmptyTestEventListener {
 public:
  explicit TestTimer(int seconds) : seconds_(seconds), thread_([this] { run(); }) {}
  ~TestTimer() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

 private:
  void OnTestStart(const ::testing::TestInfo& info) override {
    std::lock_guard lock(mutex_);
    name_ = std::string(info.test_suite_name()) + "." + info.name();
    deadline_.emplace(seconds_);
  }
  void OnTestEnd(const ::testing::TestInfo&) override {
    std::lock_guard lock(mutex_);
    deadline_.reset();
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (deadline_ && deadline_->passed()) {
        // No World::abort here: this is not the thread that may talk to peers. The launcher, or the
        // closed connection, ends the others.
        std::cerr << "[rank " << test_world->rank() << "] " << name_ << " still runs after "
                  << seconds_ << " s: a hang is a failure\n";
        std::_Exit(1);
      }
      wake_.wait_for(lock, std::chrono::milliseconds(100));
    }
  }

  const int seconds_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::optional<Deadline> deadline_;
  std::string name_;
  std::thread thread_;
};

class FailurePrinter : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed())
      return;
    // One write: the ranks share the terminal.
    std::cerr << message("[rank ", test_world->rank(), "] ",
                         result.file_name() ? result.file_name() : "?", ":", result.line_number(),
                         ": ", result.summary(), "\n")
              << std::flush;
  }
};

std::string option(int argc, char** argv, const char* name, const std::string& otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], name) == 0)
      return argv[i + 1];
  }
  return otherwise;
}

int skip(const LaunchEnvironment& launch, const std::string& why) {
  if (launch.rank == 0)
    std::cout << "SKIP: " << why << std::endl;
  return kSkipped;
}

int run(int argc, char** argv) {
  const LaunchEnvironment launch = detect_launch_environment();
  const bool cuda = option(argc, argv, "--device", "host") == "cuda";
  const std::string comm = option(argc, argv, "--comm", "peer");
  const bool staged = comm == "staged" || comm == "peer-staged";
  if (cuda) {
    const int count = cuda_device_count();
    const bool too_few = count > 1 && count < launch.local_world_size && !staged;
    if (count == 0)
      return skip(launch, cuda_unavailable_reason());
    if (too_few)
      return skip(launch, message(count, " GPUs for ", launch.local_world_size, " ranks"));
  }
  setenv("ROWSHARD_COMM_TIMEOUT", "60", /*overwrite=*/0);
  std::unique_ptr<World> world;
  try {
    world = World::create(launch, cuda ? DeviceKind::kCuda : DeviceKind::kHost,
                          comm == "staged"        ? CudaTransport::kStaged
                          : comm == "peer-staged" ? CudaTransport::kPeerStaged
                          : comm == "nccl"        ? CudaTransport::kNccl
                                                  : CudaTransport::kPeer);
  } catch (const SharedGpuError& error) {
    return skip(launch, message("fewer GPUs than ranks: ", error.what()));
  }
  test_world = world.get();

  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (launch.rank > 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  listeners.Append(
      new TestTimer(environment_int("ROWSHARD_TEST_SECONDS").value_or(kDefaultTestSeconds)));
  const int own = RUN_ALL_TESTS();
  try {
    int worst = 0;
    for (const std::string& code : world->bootstrap().all_gather(std::to_string(own))) {
      worst = std::max(worst, std::stoi(code));
    }
    if (worst != 0 && own == 0 && launch.rank == 0)
      std::cout << "FAILED on another rank\n";
    return worst;
  } catch (const std::exception& error) {
    std::cerr << "[rank " << launch.rank << "] " << error.what() << std::endl;
    world->abort(error.what());
    return 1;
  }
}

}  // namespace
}  // namespace rowshard::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    return rowshard::testing::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
