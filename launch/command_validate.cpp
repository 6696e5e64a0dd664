#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "failure.h"
#include "finetune/validation.h"
#include "option_set.h"
#include "ranks.h"

namespace rowshard {

namespace {

void print(const World& world, ValidationMode mode, const ValidationReport& report) {
  std::printf("validate %s: %d rank(s) on %s, started by %s%s%s\n", to_string(mode), world.size(),
              device_name(world.device()).c_str(), to_string(world.launch().launcher),
              world.device().is_cuda() ? ", over " : "",
              world.device().is_cuda() ? to_string(world.transport()) : "");
  for (const ValidationCheck& check : report.checks) {
    std::printf("%-6s %s\n       %s\n", check.ok ? "ok" : "WRONG", check.name.c_str(),
                check.detail.c_str());
  }
  std::fflush(stdout);
}

void write_json(const std::string& file, const World& world, ValidationMode mode,
                const ValidationReport& report) {
  nlohmann::ordered_json json;
  json["validate"] = to_string(mode);
  json["ranks"] = world.size();
  json["device"] = device_name(world.device());
  json["launcher"] = to_string(world.launch().launcher);
  json["transport"] = to_string(world.transport());
  json["result"] = report.passed() ? "PASS" : report.skipped.empty() ? "FAIL" : "SKIPPED";
  if (!report.skipped.empty())
    json["reason"] = report.skipped;
  json["checks"] = nlohmann::ordered_json::array();
  for (const ValidationCheck& check : report.checks)
    json["checks"].push_back({{"name", check.name}, {"ok", check.ok}, {"detail", check.detail}});
  std::ofstream out(file);
  out << json.dump(2) << "\n" << std::flush;
  ROWSHARD_CHECK(out, ConfigError, "--json ", file, ": cannot write this file");
}

}  // namespace

int command_validate(int argc, char** argv) {
  std::string name, json;
  DeviceChoice device = DeviceChoice::kAuto;
  CudaTransport transport = CudaTransport::kPeer;
  OptionSet set(
      "validate single|fsdp2-reshard|fsdp2-keep|hsdp|tp-sp|fsdp2-tp|grouped|mxfp8 [options]",
      "Checks on these ranks what a mode of parallelism promises: bits that do not differ,\n"
      "bytes as planned, nothing left over. Ends in PASS, FAIL or SKIPPED.");
  set.positional("MODE", name);
  set.add("json", "FILE", "write the checks there too", json);
  set.add_choice("device", "auto|cuda|host", "where to run; auto takes cuda when a GPU is visible",
                 device, parse_device_choice);
  set.add_choice("transport", "peer|nccl|staged|peer-staged",
                 "how GPU buffers travel, as in finetune", transport, parse_transport);
  if (!set.parse(argc, argv, std::cout))
    return 0;
  const ValidationMode mode = parse_validation_mode(name);
  int code = 0;
  const int failed = run_on_ranks(device, transport, [&](World& world) {
    const ValidationReport report = validate(world, mode);
    code = report.passed() ? 0 : report.skipped.empty() ? kExitFailure : kExitSkip;
    if (world.rank() != 0)
      return;
    print(world, mode, report);
    if (!json.empty())
      write_json(json, world, mode, report);
    if (!report.skipped.empty()) {
      std::printf("SKIPPED: %s\n", report.skipped.c_str());
    } else {
      std::printf("%s\n", report.passed() ? "PASS" : "FAIL");
    }
    std::fflush(stdout);
  });
  return failed ? failed : code;
}

}  // namespace rowshard
