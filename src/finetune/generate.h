// Greedy generation, for looking at what a model says before and after training.
#pragma once

#include "finetune/job.h"

namespace rowshard {

/// The adapters of a PEFT directory, for a job's model.
std::unique_ptr<AdapterSet> adapters_from(Job& job, const std::filesystem::path& directory);

/// `rowshard generate`: the ids after the prompt, greedy, ending before an end-of-sequence id.
/// Collective: every rank computes the same ids.
std::vector<int32_t> run_generate(World& world, const GenerateOptions& options,
                                  const std::vector<int32_t>& prompt);

}  // namespace rowshard
