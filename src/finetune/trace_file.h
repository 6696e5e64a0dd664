// Where a rank's trace goes.
#pragma once

#include <string>

#include "comm/world.h"
#include "core/trace.h"

namespace rowshard {

/// `file` with one rank; with several, the rank's number goes before its ending: trace.rank1.json.
std::string trace_path(const std::string& file, int rank, int ranks);
/// Writes the trace of this rank; Error with the path when it cannot.
void write_trace(const Trace& trace, const std::string& file, const World& world);

}  // namespace rowshard
