// The commands of the program. Each parses its own arguments (argv[0] is the command's name), runs
// and returns the exit code; exceptions are main's to report.
#pragma once

namespace rowshard {

int command_finetune(int argc, char** argv);
int command_plan(int argc, char** argv);
int command_quantize(int argc, char** argv);
int command_merge(int argc, char** argv);
int command_evaluate(int argc, char** argv);
int command_generate(int argc, char** argv);
int command_validate(int argc, char** argv);
int command_bench(int argc, char** argv);
int command_inspect(int argc, char** argv);

}  // namespace rowshard
