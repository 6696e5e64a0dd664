#include "finetune/trace_file.h"

#include <filesystem>
#include <fstream>

namespace rowshard {

std::string trace_path(const std::string& file, int rank, int ranks) {
  if (ranks == 1)
    return file;
  const std::filesystem::path path(file);
  return (path.parent_path() /
          (path.stem().string() + message(".rank", rank) + path.extension().string()))
      .string();
}

void write_trace(const Trace& trace, const std::string& file, const World& world) {
  const std::string path = trace_path(file, world.rank(), world.size());
  std::ofstream out(path);
  out << trace.json(world.rank()) << std::flush;
  ROWSHARD_CHECK(out, Error, "--trace ", path, ": cannot write this file");
}

}  // namespace rowshard
