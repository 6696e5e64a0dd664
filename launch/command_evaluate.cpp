#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "console.h"
#include "finetune/trainer.h"
#include "options.h"
#include "ranks.h"

namespace rowshard {

namespace {

void print(const EvalMetrics& metrics, bool json) {
  const double perplexity = std::exp(metrics.eval_loss);
  if (json) {
    const nlohmann::ordered_json object = {
        {"loss", metrics.eval_loss}, {"perplexity", perplexity}, {"tokens", metrics.eval_tokens}};
    std::cout << object.dump() << std::endl;
    return;
  }
  std::cout.precision(9);
  std::cout << "loss        " << metrics.eval_loss << "\nperplexity  " << perplexity
            << "\ntokens      " << metrics.eval_tokens << std::endl;
}

}  // namespace

int command_evaluate(int argc, char** argv) {
  EvaluateOptions options;
  if (!parse_options(argc, argv, std::cout, options))
    return 0;
  return run_on_ranks(options.execution.device, options.execution.transport, [&](World& world) {
    Console console(world.rank() == 0 && !options.json);
    const EvalMetrics metrics = run_evaluate(world, options, console);
    if (world.rank() == 0)
      print(metrics, options.json);
  });
}

}  // namespace rowshard
