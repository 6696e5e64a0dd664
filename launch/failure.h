// Exceptions become one line on stderr and an exit code: 2 what the user gave is wrong, 1 anything
// else that failed, 77 skipped.
#pragma once

#include <exception>
#include <string>

#include "comm/launch_environment.h"
#include "core/error.h"

namespace rowshard {

inline constexpr int kExitFailure = 1;
inline constexpr int kExitConfig = 2;
inline constexpr int kExitSkip = 77;

/// Not a failure: what was asked for cannot be done here (too few GPUs), and the text says why.
class Skip : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

int exit_code(const std::exception& error);

/// "rowshard: [rank 1/4 node7] text"; without the rank in a job of one.
void print_failure(const std::exception& error, const LaunchEnvironment& launch);

/// For an error before the ranks have met, which all of them make from the same arguments: rank 0
/// prints it, the others end quietly. Returns the exit code.
int fail_alone(const std::exception& error);

}  // namespace rowshard
