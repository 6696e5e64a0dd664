#include "bench_stack.h"

#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "finetune/job.h"
#include "layers/stack_bench.h"
#include "options.h"
#include "ranks.h"

namespace rowshard {

namespace {

using Json = nlohmann::ordered_json;

struct Arguments {
  StackBenchOptions bench;
  DeviceChoice device = DeviceChoice::kAuto;
  std::string json;
};

bool parse(int argc, char** argv, Arguments& arguments) {
  StackBenchOptions& bench = arguments.bench;
  OptionSet set("bench stack [options]",
                "Frozen FP8 linear layers, forward and backward: bytes and step time with the\n"
                "columnwise copies released after dgrad, beside keeping them.");
  set.add("layers", "N", "layers of the stack", bench.layers);
  set.add("features", "N", "inputs and outputs of a layer", bench.features);
  set.add("tokens", "N", "rows of a step", bench.tokens);
  set.add("repeats", "N", "timed repeats; the median counts", bench.repeats);
  set.add("steps", "N", "steps in one repeat", bench.steps);
  set.add("graph", "replay a step as one CUDA graph", bench.graph);
  set.add("json", "FILE", "write the figures there too", arguments.json);
  set.add_choice("device", "auto|cuda|host", "where to run; auto takes cuda when a GPU is visible",
                 arguments.device, parse_device_choice);
  if (!set.parse(argc, argv, std::cout))
    return false;
  check(bench);
  return true;
}

const char* start_of(bool both) {
  return both ? "both" : "rowwise";
}

Json report(const StackBenchResult& result) {
  std::printf("%-10s %-9s %10s %10s %14s %14s %16s\n", "policy", "made with", "step ms", "fastest",
              "steady bytes", "peak bytes", "columnwise peak");
  Json stacks = Json::array(), differences = Json::array();
  for (const StackMeasurement& s : result.stacks) {
    std::printf("%-10s %-9s %10.4f %10.4f %14lld %14lld %16lld\n", to_string(s.policy),
                start_of(s.both_at_start), s.step_ms, s.fastest_ms,
                static_cast<long long>(s.total.steady), static_cast<long long>(s.total.peak),
                static_cast<long long>(s.columnwise.peak));
    stacks.push_back({{"policy", to_string(s.policy)},
                      {"made_with", start_of(s.both_at_start)},
                      {"step_ms", s.step_ms},
                      {"fastest_ms", s.fastest_ms},
                      {"steady_bytes", s.total.steady},
                      {"peak_bytes", s.total.peak},
                      {"columnwise_steady_bytes", s.columnwise.steady},
                      {"columnwise_peak_bytes", s.columnwise.peak},
                      {"scales_steady_bytes", s.scales.steady}});
  }
  for (const StackDifference& d : result.differences) {
    std::printf(
        "release, made with %s: step time %+.2f %%, steady %lld bytes less (%lld codes, %lld "
        "scales), peak %lld bytes less\n",
        start_of(d.both_at_start), 100 * d.time, static_cast<long long>(d.steady),
        static_cast<long long>(d.codes), static_cast<long long>(d.steady - d.codes),
        static_cast<long long>(d.peak));
    differences.push_back({{"made_with", start_of(d.both_at_start)},
                           {"step_time", d.time},
                           {"steady_bytes", d.steady},
                           {"codes_bytes", d.codes},
                           {"peak_bytes", d.peak}});
  }
  return {{"stacks", stacks}, {"release_less_resident", differences}};
}

}  // namespace

int bench_stack_command(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments))
    return 0;
  require_one_process("bench");
  const StackBenchOptions& bench = arguments.bench;
  const Device device{resolve_device(arguments.device), 0};
  set_device(device);
  const StackBenchResult result = bench_stack(bench, device);
  std::printf("%s: %d layers of %lld features, %lld tokens, median of %d, all the same bits\n",
              device_name(device).c_str(), bench.layers, static_cast<long long>(bench.features),
              static_cast<long long>(bench.tokens), bench.repeats);
  Json all = {{"bench", "stack"},       {"device", device_name(device)},
              {"layers", bench.layers}, {"features", bench.features},
              {"tokens", bench.tokens}, {"repeats", bench.repeats},
              {"graph", bench.graph}};
  all.update(report(result));
  std::fflush(stdout);
  if (arguments.json.empty())
    return 0;
  std::ofstream out(arguments.json);
  out << all.dump(2) << "\n" << std::flush;
  ROWSHARD_CHECK(out, ConfigError, "--json ", arguments.json, ": cannot write this file");
  return 0;
}

}  // namespace rowshard
