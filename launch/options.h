// The options of the commands that run the model, bound to the library's structs.
#pragma once

#include "finetune/options.h"
#include "finetune/step_bench.h"
#include "option_set.h"

namespace rowshard {

// Each fills and checks `options`; false when --help was asked for and printed on `out`.
bool parse_options(int argc, char** argv, std::ostream& out, FinetuneOptions& options);
bool parse_options(int argc, char** argv, std::ostream& out, PlanOptions& options);
bool parse_options(int argc, char** argv, std::ostream& out, EvaluateOptions& options);
bool parse_options(int argc, char** argv, std::ostream& out, GenerateOptions& options);

/// `json`: a file for the figures.
bool parse_options(int argc, char** argv, std::ostream& out, StepBenchOptions& options,
                   std::string& json);

}  // namespace rowshard
