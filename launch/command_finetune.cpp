#include <iostream>

#include "commands.h"
#include "console.h"
#include "finetune/trainer.h"
#include "options.h"
#include "ranks.h"

namespace rowshard {

int command_finetune(int argc, char** argv) {
  FinetuneOptions options;
  if (!parse_options(argc, argv, std::cout, options))
    return 0;
  return run_on_ranks(options.execution.device, options.execution.transport, [&](World& world) {
    Console console(world.rank() == 0);
    run_finetune(world, options, console);
  });
}

}  // namespace rowshard
