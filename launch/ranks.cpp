#include "ranks.h"

#include <chrono>
#include <iostream>
#include <thread>

#include "comm/host_engine.h"
#include "comm/transport.h"
#include "core/log.h"
#include "failure.h"
#include "finetune/job.h"

namespace rowshard {

namespace {

// All ranks read the same options and files, so a ConfigError of one is mostly that of all. Rank 0
// speaks; another rank waits this long for rank 0 to end the job before it speaks itself.
constexpr std::chrono::seconds kGrace{2};

int end_job(const std::exception& error, World& world) {
  world.bootstrap().abandon();  // nobody waits for this rank's goodbye
  const bool shared = exit_code(error) != kExitFailure;
  if (shared && world.rank() == 0) {
    print_failure(error, world.launch());
    return exit_code(error);
  }
  if (shared) {
    std::this_thread::sleep_for(kGrace);
    try {
      world.bootstrap().engine().transport().check_peers();
    } catch (const CommError&) {
      return exit_code(error);  // rank 0 has gone, and has said why
    }
  }
  print_failure(error, world.launch());
  world.abort(error.what());
  return exit_code(error);
}

}  // namespace

int run_on_ranks(DeviceChoice device, CudaTransport transport,
                 const std::function<void(World&)>& body) {
  const LaunchEnvironment launch = detect_launch_environment();
  set_log_sink([rank = launch.rank](const std::string& line) {
    if (rank == 0)
      std::cerr << "rowshard: " + line + "\n" << std::flush;
  });
  const auto world = World::create(launch, resolve_device(device), transport);
  try {
    body(*world);
  } catch (const std::exception& error) {
    return end_job(error, *world);
  }
  return 0;
}

}  // namespace rowshard
