// Runs the body of a command on all ranks of the job this process was started in.
#pragma once

#include <functional>

#include "comm/world.h"
#include "finetune/options.h"

namespace rowshard {

/// Makes the World, runs `body` on it and returns the exit code. A failure is printed once where
/// all ranks share it, and ends the job on every rank.
int run_on_ranks(DeviceChoice device, CudaTransport transport,
                 const std::function<void(World&)>& body);

/// For commands that are no job of several ranks: ConfigError when several were started.
void require_one_process(const std::string& command);

}  // namespace rowshard
