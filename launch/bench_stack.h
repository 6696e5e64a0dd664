// `rowshard bench stack`: options, table and --json of layers/stack_bench.h.
#pragma once

namespace rowshard {

/// argv[0] is "stack".
int bench_stack_command(int argc, char** argv);

}  // namespace rowshard
