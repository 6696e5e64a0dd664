#include "ranks.h"

#include <algorithm>
#include <iostream>
#include <optional>

#include "core/log.h"
#include "failure.h"
#include "finetune/job.h"

namespace rowshard {

namespace {

// All ranks read the same options and files, so what is wrong with them is mostly wrong on all.
// Each asks the others for so long whether they met it too.
constexpr double kSurveySeconds = 2;

enum class Met { kByAll, kByRankZeroToo, kAlone };

Met who_met(const std::string& text, Bootstrap& bootstrap) {
  const auto answers = bootstrap.survey(text, kSurveySeconds);
  const auto same = [&](const std::optional<std::string>& answer) { return answer == text; };
  if (std::ranges::all_of(answers, same))
    return Met::kByAll;
  return bootstrap.rank() != 0 && same(answers[0]) ? Met::kByRankZeroToo : Met::kAlone;
}

int end_job(const std::exception& error, World& world) {
  const bool from_input = exit_code(error) != kExitFailure;
  const Met met = from_input ? who_met(error.what(), world.bootstrap()) : Met::kAlone;
  if (met == Met::kAlone || world.rank() == 0)
    print_failure(error, world.launch());
  if (met != Met::kByAll)
    world.abort(error.what());
  world.bootstrap().abandon();  // nobody waits for this rank's goodbye
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

void require_one_process(const std::string& command) {
  const int ranks = detect_launch_environment().world_size;
  ROWSHARD_CHECK(ranks == 1, ConfigError, command, " is the work of one process; ", ranks,
                 " were started");
}

}  // namespace rowshard
