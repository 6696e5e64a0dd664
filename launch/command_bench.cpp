#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "bench_collectives.h"
#include "commands.h"
#include "options.h"
#include "ranks.h"

namespace rowshard {

namespace {

struct BenchOptions {
  std::string what;
  std::string json;
  DeviceChoice device = DeviceChoice::kAuto;
  CudaTransport transport = CudaTransport::kNccl;
  CollectiveBenchOptions collectives;
};

bool parse(int argc, char** argv, BenchOptions& options) {
  OptionSet set("bench collectives [options]",
                "Checks the collectives over all ranks byte by byte, then measures them.");
  set.positional("WHAT", options.what);
  set.add("mib", "N", "MiB of the larger operand", options.collectives.mebibytes);
  set.add("repeats", "N", "timed runs; the median counts", options.collectives.repeats);
  set.add("json", "FILE", "write the figures there too", options.json);
  set.add_choice("device", "auto|cuda|host", "where to run; auto takes cuda when a GPU is visible",
                 options.device, parse_device_choice);
  set.add_choice(
      "transport", "nccl|staged",
      "how GPU buffers travel: NCCL, or through host memory (slow; ranks may share a GPU)",
      options.transport, parse_transport);
  if (!set.parse(argc, argv, std::cout))
    return false;
  ROWSHARD_CHECK(options.what == "collectives", ConfigError, "bench ", options.what,
                 ": use collectives");
  ROWSHARD_CHECK(options.collectives.mebibytes >= 1 && options.collectives.mebibytes <= 65536,
                 ConfigError, "--mib ", options.collectives.mebibytes, ": must be 1 to 65536");
  ROWSHARD_CHECK(options.collectives.repeats >= 1, ConfigError, "--repeats ",
                 options.collectives.repeats, ": must be at least 1");
  return true;
}

void report(const World& world, const std::vector<CollectiveResult>& results,
            const BenchOptions& options) {
  const std::string transport = world.device().is_cuda()            ? to_string(world.transport())
                                : uses_mpi(world.launch().launcher) ? "mpi"
                                                                    : "tcp";
  std::printf("%d ranks on %s over %s, contents verified\n", world.size(),
              to_string(world.device().kind), transport.c_str());
  std::printf("%-16s %10s %10s %12s\n", "collective", "MiB", "ms", "bus GB/s");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const CollectiveResult& r : results) {
    std::printf("%-16s %10.1f %10.3f %12.2f\n", r.name.c_str(),
                static_cast<double>(r.bytes) / (1 << 20), r.milliseconds, r.bus_gbps);
    rows.push_back({{"collective", r.name},
                    {"bytes", r.bytes},
                    {"ms", r.milliseconds},
                    {"bus_gb_per_s", r.bus_gbps}});
  }
  std::fflush(stdout);
  if (options.json.empty())
    return;
  const nlohmann::ordered_json all = {{"bench", "collectives"},
                                      {"ranks", world.size()},
                                      {"launcher", to_string(world.launch().launcher)},
                                      {"device", device_name(world.device())},
                                      {"transport", transport},
                                      {"results", rows}};
  std::ofstream out(options.json);
  out << all.dump(2) << "\n" << std::flush;
  ROWSHARD_CHECK(out, ConfigError, "--json ", options.json, ": cannot write this file");
}

}  // namespace

int command_bench(int argc, char** argv) {
  BenchOptions options;
  if (!parse(argc, argv, options))
    return 0;
  return run_on_ranks(options.device, options.transport, [&](World& world) {
    world.agree("bench options", message("--mib ", options.collectives.mebibytes, " --repeats ",
                                         options.collectives.repeats));
    const auto results = bench_collectives(world, options.collectives);
    if (world.rank() == 0)
      report(world, results, options);
  });
}

}  // namespace rowshard
