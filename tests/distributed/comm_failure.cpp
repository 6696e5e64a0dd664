// A job whose last rank misbehaves: `comm_failure throw|stuck|die`. It handles exceptions as the
// rowshard program does. Every other rank must end inside the deadline, with a message that names
// the rank and the collective; expect_failure.sh checks both.
#include <unistd.h>

#include <iostream>

#include "comm/world.h"

namespace {

using namespace rowshard;

void run(World& world, const std::string& how) {
  auto comm = world.communicator("gather");
  Stream stream(kHost, "gather");
  const int64_t size = world.size();
  float part = 1;
  std::vector<float> whole(static_cast<size_t>(size));
  const auto gather = [&] {
    comm->all_gather(View(whole.data(), DType::kF32, {size}, kHost),
                     ConstView(&part, DType::kF32, {1}, kHost), stream);
    stream.synchronize();
  };
  gather();
  if (world.rank() == world.size() - 1) {
    if (how == "throw")
      throw ConfigError("the data file is empty");
    if (how == "die")
      _exit(9);
    if (how == "stuck")
      sleep(20);
  }
  gather();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  if (how != "throw" && how != "stuck" && how != "die") {
    std::cerr << "usage: comm_failure throw|stuck|die\n";
    return 2;
  }
  std::unique_ptr<World> world;
  try {
    world = World::create(detect_launch_environment(), DeviceKind::kHost);
    run(*world, how);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << message("[rank ", world ? world->rank() : -1, "] ", error.what(), "\n")
              << std::flush;
    if (world)
      world->abort(error.what());
    return 1;
  }
}
