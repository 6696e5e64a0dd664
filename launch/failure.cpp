#include "failure.h"

#include <unistd.h>

#include <iostream>

namespace rowshard {

int exit_code(const std::exception& error) {
  if (dynamic_cast<const Skip*>(&error))
    return kExitSkip;
  return dynamic_cast<const ConfigError*>(&error) ? kExitConfig : kExitFailure;
}

void print_failure(const std::exception& error, const LaunchEnvironment& launch) {
  std::string who;
  if (launch.world_size > 1) {
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    who = message("[rank ", launch.rank, "/", launch.world_size, " ", host, "] ");
  }
  const char* kind = dynamic_cast<const Skip*>(&error) ? "SKIPPED: " : "";
  // One write: lines of several ranks must not run into each other.
  std::cerr << message("rowshard: ", who, kind, error.what(), "\n") << std::flush;
}

int fail_alone(const std::exception& error) {
  LaunchEnvironment launch;
  try {
    launch = detect_launch_environment();
  } catch (const Error&) {
    // The environment is broken too: then every rank says what it knows.
  }
  if (launch.rank == 0)
    print_failure(error, launch);
  return exit_code(error);
}

}  // namespace rowshard
