#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "bench_collectives.h"
#include "bench_stack.h"
#include "commands.h"
#include "core/log.h"
#include "finetune/job.h"
#include "fp8/bench.h"
#include "layers/attention_bench.h"
#include "options.h"
#include "ranks.h"

namespace rowshard {

namespace {

using Json = nlohmann::ordered_json;

struct Arguments {
  std::string what;
  std::string json;
  std::string only;
  DeviceChoice device = DeviceChoice::kAuto;
  CudaTransport transport = CudaTransport::kPeer;
  int repeats = 31;
  int64_t mebibytes = 64;
};

bool parse(int argc, char** argv, Arguments& arguments) {
  OptionSet set(
      "bench collectives|kernels|gemm|attention|stack|step [options]",
      "step         a training step of a model shape: bench step --help\n"
      "stack        release or keep columnwise copies, bytes and time: bench stack --help\n"
      "collectives  checks the collectives over all ranks, then measures them\n"
      "kernels      FP8 quantisers, dequantise and rebuild, beside the device's own copy\n"
      "gemm         the FP8 GEMM at the layer shapes of Llama-3.1-8B and 70B\n"
      "attention    forward and backward at the heads of Llama-3.1-8B, beside our own kernels");
  set.positional("WHAT", arguments.what);
  set.add("repeats", "N", "timed repeats; the median counts", arguments.repeats);
  set.add("mib", "N", "collectives: MiB of the larger operand", arguments.mebibytes);
  set.add("only", "TEXT", "gemm: weights whose name contains this, e.g. \"8B o\"", arguments.only);
  set.add("json", "FILE", "write the figures there too", arguments.json);
  set.add_choice("device", "auto|cuda|host", "where to run; auto takes cuda when a GPU is visible",
                 arguments.device, parse_device_choice);
  set.add_choice("transport", "peer|nccl|staged|peer-staged",
                 "collectives: as in finetune; gathers of fixed parts are those that peer changes",
                 arguments.transport, parse_transport);
  if (!set.parse(argc, argv, std::cout))
    return false;
  ROWSHARD_CHECK(arguments.what == "collectives" || arguments.what == "kernels" ||
                     arguments.what == "gemm" || arguments.what == "attention",
                 ConfigError, "bench ", arguments.what,
                 ": use one of collectives, kernels, gemm, attention, stack, step");
  ROWSHARD_CHECK(arguments.mebibytes >= 1 && arguments.mebibytes <= 65536, ConfigError, "--mib ",
                 arguments.mebibytes, ": must be 1 to 65536");
  ROWSHARD_CHECK(arguments.repeats >= 1, ConfigError, "--repeats ", arguments.repeats,
                 ": must be at least 1");
  return true;
}

void write_json(const std::string& file, const Json& all) {
  std::fflush(stdout);
  if (file.empty())
    return;
  std::ofstream out(file);
  out << all.dump(2) << "\n" << std::flush;
  ROWSHARD_CHECK(out, ConfigError, "--json ", file, ": cannot write this file");
}

void write_json(const Arguments& arguments, Device device, Json facts, const Json& results) {
  Json all = {{"bench", arguments.what}, {"device", device_name(device)}};
  all.update(facts);
  all["repeats"] = arguments.repeats;
  all["results"] = results;
  write_json(arguments.json, all);
}

void report_collectives(const World& world, const std::vector<CollectiveResult>& results,
                        const Arguments& arguments) {
  const std::string transport = world.device().is_cuda()            ? to_string(world.transport())
                                : uses_mpi(world.launch().launcher) ? "mpi"
                                                                    : "tcp";
  std::printf("%d ranks on %s over %s, contents verified\n", world.size(),
              device_name(world.device()).c_str(), transport.c_str());
  std::printf("%-16s %10s %10s %12s\n", "collective", "MiB", "ms", "bus GB/s");
  Json rows = Json::array();
  for (const CollectiveResult& r : results) {
    std::printf("%-16s %10.1f %10.3f %12.2f\n", r.name.c_str(),
                static_cast<double>(r.bytes) / (1 << 20), r.milliseconds, r.bus_gbps);
    rows.push_back({{"collective", r.name},
                    {"bytes", r.bytes},
                    {"ms", r.milliseconds},
                    {"bus_gb_per_s", r.bus_gbps}});
  }
  write_json(arguments, world.device(),
             {{"ranks", world.size()},
              {"launcher", to_string(world.launch().launcher)},
              {"transport", transport}},
             rows);
}

void bench_collectives_command(World& world, const Arguments& arguments) {
  world.agree("bench options",
              message("--mib ", arguments.mebibytes, " --repeats ", arguments.repeats));
  const auto results =
      bench_collectives(world, {.mebibytes = arguments.mebibytes, .repeats = arguments.repeats});
  if (world.rank() == 0)
    report_collectives(world, results, arguments);
}

void bench_kernels_command(const BenchOptions& options, const Arguments& arguments, Context& ctx) {
  std::printf("%s, median of %d\n", device_name(ctx.device()).c_str(), options.repeats);
  std::printf("%-38s %14s %10s %10s %8s\n", "kernel", "shape", "us", "GB/s", "of copy");
  Json rows = Json::array();
  for (const KernelMeasurement& r : bench_fp8_kernels(options, ctx)) {
    std::printf("%-38s %14s %10.2f %10.0f %7.0f%%\n", r.name.c_str(),
                message(r.rows, "x", r.cols).c_str(), r.median_us, r.gb_per_s, r.of_copy * 100);
    rows.push_back({{"kernel", r.name},
                    {"rows", r.rows},
                    {"cols", r.cols},
                    {"bytes", r.bytes},
                    {"median_us", r.median_us},
                    {"fastest_us", r.fastest_us},
                    {"gb_per_s", r.gb_per_s},
                    {"copy_gb_per_s", r.copy_gb_per_s},
                    {"of_copy", r.of_copy}});
  }
  write_json(arguments, ctx.device(), Json::object(), rows);
}

void bench_attention_command(const Arguments& arguments, Context& ctx) {
  std::printf("%s, median of %d\n", device_name(ctx.device()).c_str(), arguments.repeats);
  std::printf("%-12s %10s %10s %10s %12s %12s %12s\n", "segments", "fwd us", "bwd us", "host us",
              "own fwd us", "own bwd us", "scratch MiB");
  Json rows = Json::array();
  for (const AttentionMeasurement& r : bench_attention(arguments.repeats, ctx)) {
    std::printf("%-12s %10.1f %10.1f %10.1f %12.1f %12.1f %12.1f\n", r.packing.c_str(),
                r.forward_us, r.backward_us, r.host_us, r.own_forward_us, r.own_backward_us,
                static_cast<double>(r.scratch_bytes) / (1 << 20));
    rows.push_back({{"segments", r.packing},
                    {"tokens", r.tokens},
                    {"heads", r.heads},
                    {"kv_heads", r.kv_heads},
                    {"head_dim", r.head_dim},
                    {"forward_us", r.forward_us},
                    {"backward_us", r.backward_us},
                    {"host_us", r.host_us},
                    {"own_forward_us", r.own_forward_us},
                    {"own_backward_us", r.own_backward_us},
                    {"scratch_bytes", r.scratch_bytes}});
  }
  write_json(arguments, ctx.device(), Json::object(), rows);
}

void bench_gemm_command(const BenchOptions& options, const std::vector<GemmShape>& shapes,
                        const Arguments& arguments, Context& ctx) {
  std::printf("%s, median of %d\n", device_name(ctx.device()).c_str(), options.repeats);
  std::printf("%-16s %-6s %6s %6s %6s %10s %9s %9s %9s %8s\n", "weight", "", "M", "N", "K", "us",
              "TFLOP/s", "host us", "bare us", "of best");
  Json rows = Json::array();
  for (const GemmMeasurement& r : bench_fp8_gemm(options, shapes, ctx)) {
    std::printf("%-16s %-6s %6lld %6lld %6lld %10.2f %9.1f %9.2f %9.2f %8.3f\n", r.name.c_str(),
                r.product.c_str(), static_cast<long long>(r.m), static_cast<long long>(r.n),
                static_cast<long long>(r.k), r.median_us, r.tflop_per_s, r.host_us, r.bare_host_us,
                r.of_best);
    rows.push_back({{"weight", r.name},
                    {"product", r.product},
                    {"m", r.m},
                    {"n", r.n},
                    {"k", r.k},
                    {"median_us", r.median_us},
                    {"fastest_us", r.fastest_us},
                    {"tflop_per_s", r.tflop_per_s},
                    {"host_us", r.host_us},
                    {"bare_host_us", r.bare_host_us},
                    {"best_algorithm_us", r.best_algorithm_us},
                    {"of_best", r.of_best}});
  }
  write_json(arguments, ctx.device(), Json::object(), rows);
}

void report_step(const World& world, const StepBenchOptions& options, const StepBenchResult& result,
                 const std::string& json) {
  std::printf("%d ranks on %s over %s, %lld tokens a rank, prefetch %d, every step the same bits\n",
              world.size(), device_name(world.device()).c_str(), to_string(world.transport()),
              static_cast<long long>(options.tokens * options.grad_accum),
              options.execution.prefetch);
  std::printf("%-10s %10s %10s %10s %12s %12s %12s %10s\n", "reshard", "step ms", "wait ms",
              "tp wait", "reduction ms", "tokens/s", "wire MiB", "peak GiB");
  Json rows = Json::array();
  for (const StepMeasurement& r : result.modes) {
    std::printf("%-10s %10.3f %10.3f %10.3f %12.3f %12.0f %12.1f %10.2f\n", r.mode.c_str(),
                r.step_ms, r.wait_ms, r.tp_wait_ms, r.reduction_ms, r.tokens_per_second,
                static_cast<double>(r.wire_bytes) / (1 << 20),
                static_cast<double>(r.peak_bytes) / (1 << 30));
    rows.push_back({{"reshard", r.mode},
                    {"step_ms", r.step_ms},
                    {"wait_ms", r.wait_ms},
                    {"tp_wait_ms", r.tp_wait_ms},
                    {"reduction_ms", r.reduction_ms},
                    {"tokens_per_second", r.tokens_per_second},
                    {"wire_bytes", r.wire_bytes},
                    {"peak_bytes", r.peak_bytes},
                    {"loss", r.loss},
                    {"grad_norm", r.grad_norm}});
  }
  Json all = {{"bench", "step"},
              {"device", device_name(world.device())},
              {"ranks", world.size()},
              {"launcher", to_string(world.launch().launcher)},
              {"transport", to_string(world.transport())},
              {"tokens", options.tokens},
              {"grad_accum", options.grad_accum},
              {"results", rows}};
  if (result.not_hidden) {
    std::printf("communication not hidden: %.2f %% of the step\n", 100 * *result.not_hidden);
    all["not_hidden"] = *result.not_hidden;
  }
  if (options.execution.tp > 1) {
    const StepMeasurement& asked = result.modes.front();
    const double shown = (asked.tp_wait_ms + asked.reduction_ms + asked.wait_ms) / asked.step_ms;
    std::printf("exposed communication: %.2f %% of the step", 100 * shown);
    if (result.modes.back().mode == "tp waits") {
      std::printf(", which takes %.3f of the time it takes without overlap",
                  asked.step_ms / result.modes.back().step_ms);
    }
    std::printf("\n");
    all["exposed"] = shown;
  }
  write_json(json, all);
}

int bench_step_command(int argc, char** argv) {
  StepBenchOptions options = default_step_bench();
  std::string json;
  if (!parse_options(argc, argv, std::cout, options, json))
    return 0;
  return run_on_ranks(options.execution.device, options.execution.transport, [&](World& world) {
    const StepBenchResult result = bench_step(world, options);
    if (world.rank() == 0)
      report_step(world, options, result, json);
  });
}

}  // namespace

int command_bench(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "step")
    return bench_step_command(argc - 1, argv + 1);
  if (argc > 1 && std::string(argv[1]) == "stack")
    return bench_stack_command(argc - 1, argv + 1);
  Arguments arguments;
  if (!parse(argc, argv, arguments))
    return 0;
  if (arguments.what == "collectives") {
    return run_on_ranks(arguments.device, arguments.transport,
                        [&](World& world) { bench_collectives_command(world, arguments); });
  }
  require_one_process(argv[0]);
  set_log_sink([](const std::string& line) { std::cerr << "rowshard: " << line << std::endl; });
  const Device device{resolve_device(arguments.device), 0};
  set_device(device);
  Arena arena(device);
  Stream stream(device);
  Context ctx{arena, stream};
  BenchOptions options;
  options.repeats = arguments.repeats;
  options.only = arguments.only;
  std::vector<GemmShape> shapes = llama_gemm_shapes();
  if (device.is_host()) {
    // The host's operations are there to be right: sizes that a person can wait for.
    options.launches = 2;
    options.rotate_bytes = 1 << 22;
    options.copy_bytes = 1 << 24;
    options.kernel_shapes = {{512, 1024}};
    options.gemm_tokens = {128};
    shapes = {{"small", 512, 1024}};
  }
  if (arguments.what == "kernels") {
    bench_kernels_command(options, arguments, ctx);
  } else if (arguments.what == "attention") {
    bench_attention_command(arguments, ctx);
  } else {
    bench_gemm_command(options, shapes, arguments, ctx);
  }
  return 0;
}

}  // namespace rowshard
