// Options as one text, so that ranks can compare what they were given.
#pragma once

#include <string>

#include "finetune/options.h"

namespace rowshard {

std::string to_text(const ExecutionOptions& options);
std::string to_text(const FinetuneOptions& options);
std::string to_text(const EvaluateOptions& options);
std::string to_text(const GenerateOptions& options);

}  // namespace rowshard
