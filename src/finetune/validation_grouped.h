// What `validate grouped` checks: the experts of a mixture layer spread over ranks, whole
// (layers/expert_parallel.h) and cut (layers/parallel_linear.h), against one rank. Models with
// experts are not trained by the program; these are the library's modules.
#pragma once

#include <functional>
#include <string>

#include "comm/world.h"

namespace rowshard {

/// `check(name, run)`: run returns what is wrong on this rank, or nothing, and leaves figures in
/// detail.
using RunCheck = std::function<void(const std::string& name,
                                    const std::function<std::string(std::string& detail)>& run)>;
/// Collective.
void validate_grouped(World& world, const RunCheck& check);

}  // namespace rowshard
