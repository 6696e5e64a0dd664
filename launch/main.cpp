// rowshard: the only place that prints, parses arguments and turns exceptions into exit codes.

#include <iostream>
#include <string>
#include <vector>

#include "commands.h"
#include "core/device.h"
#include "failure.h"
#include "option_set.h"

namespace rowshard {
namespace {

struct Command {
  const char* name;
  const char* summary;
  int (*run)(int argc, char** argv);
};

constexpr Command kCommands[] = {
    {"finetune", "train LoRA adapters on a frozen, sharded FP8 base", command_finetune},
    {"plan", "what finetune would do with the same options: usage plan, bytes per rank",
     command_plan},
    {"quantize", "a bf16 checkpoint made into a block-FP8 one", command_quantize},
    {"merge", "a base and its adapter made into one bf16 model", command_merge},
    {"evaluate", "loss and perplexity of a token file", command_evaluate},
    {"generate", "continue a prompt greedily", command_generate},
    {"validate", "check on these ranks what a mode of parallelism promises", command_validate},
    {"bench", "measure a training step, collectives, FP8 kernels or the FP8 GEMM", command_bench},
    {"inspect", "what a model, an adapter or a safetensors file holds", command_inspect},
};

void print_usage(std::ostream& out) {
  out << "usage: rowshard COMMAND [options]     (rowshard COMMAND --help lists them)\n\n";
  for (const Command& command : kCommands) {
    out << "  " << command.name << std::string(12 - std::string(command.name).size(), ' ')
        << command.summary << "\n";
  }
  out << "\n  --help      print this and exit\n"
         "  --version   print the version and the devices of this build and exit\n";
}

int run(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "--help";
  if (name == "--help" || name == "-h") {
    print_usage(std::cout);
    return argc > 1 ? 0 : kExitConfig;
  }
  if (name == "--version") {
    std::cout << "rowshard " << ROWSHARD_VERSION << " (devices: host"
              << (ROWSHARD_CUDA ? ", cuda" : "") << ")\n";
    return 0;
  }
  std::vector<std::string> known;
  for (const Command& command : kCommands) {
    if (name == command.name)
      return command.run(argc - 1, argv + 1);
    known.push_back(command.name);
  }
  const std::string guess = closest(name, known);
  throw ConfigError(
      message("there is no command ", name,
              guess.empty() ? "; rowshard --help lists them" : "; did you mean " + guess + "?"));
}

}  // namespace
}  // namespace rowshard

int main(int argc, char** argv) {
  try {
    return rowshard::run(argc, argv);
  } catch (const std::exception& error) {
    return rowshard::fail_alone(error);
  }
}
