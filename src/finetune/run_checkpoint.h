// Resumable checkpoints: directories `checkpoint-<step>` under the output directory.
//
//   state.safetensors  parameters, m, v: f32 [trainable], without padding, so that any number of
//                      ranks can read them; metadata: step, epoch, row, seed.
// A checkpoint is written under a hidden name and renamed when complete, so a directory of that
// name is always whole. The frozen base is never in it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "finetune/batches.h"

namespace rowshard {

struct RunState {
  std::vector<float> parameters, m, v;  // [trainable]
  int64_t step = 0;
  DataPosition position;
  uint64_t seed = 0;
};

void write_run_state(const std::filesystem::path& directory, const RunState& state);
/// ConfigError when the directory is no checkpoint or is not of `trainable` parameters.
RunState read_run_state(const std::filesystem::path& directory, int64_t trainable);

/// `resume`: none, auto (the newest checkpoint under `output`, if any) or a directory.
std::optional<std::filesystem::path> checkpoint_to_resume(const std::string& resume,
                                                          const std::filesystem::path& output);
/// Deletes all but the `keep` newest checkpoints under `output`.
void keep_newest_checkpoints(const std::filesystem::path& output, int64_t keep);

}  // namespace rowshard
