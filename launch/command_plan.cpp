#include <iostream>

#include "comm/launch_environment.h"
#include "commands.h"
#include "finetune/job.h"
#include "finetune/memory_plan.h"
#include "options.h"

namespace rowshard {

int command_plan(int argc, char** argv) {
  PlanOptions options;
  if (!parse_options(argc, argv, std::cout, options))
    return 0;
  const MemoryPlan plan =
      plan_memory(options.finetune, resolve_device(options.finetune.execution.device));
  if (detect_launch_environment().rank != 0)
    return 0;
  std::cout << (options.json ? to_json(plan) + "\n" : to_table(plan, true)) << std::flush;
  return 0;
}

}  // namespace rowshard
