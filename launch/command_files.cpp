// The commands that turn or describe files: one process, no device.

#include <iostream>

#include "commands.h"
#include "model/inspect.h"
#include "model/merge.h"
#include "model/quantize_checkpoint.h"
#include "option_set.h"
#include "ranks.h"

namespace rowshard {

namespace {

void add_shard_bytes(OptionSet& set, int64_t& bytes) {
  set.add("max-shard-bytes", "N", "most bytes of one safetensors file", bytes);
}

void check_paths(const std::string& model, const std::string& output, int64_t max_shard_bytes) {
  ROWSHARD_CHECK(!model.empty(), ConfigError,
                 "--model is missing: give a Hugging Face model directory");
  ROWSHARD_CHECK(!output.empty(), ConfigError,
                 "--output-dir is missing: give the directory to make");
  ROWSHARD_CHECK(max_shard_bytes >= 1, ConfigError, "--max-shard-bytes ", max_shard_bytes,
                 ": must be at least 1");
}

void report(const CheckpointSummary& summary, const char* converted, const std::string& output) {
  std::cout << output << ": " << summary.converted << " tensors " << converted << ", "
            << summary.kept << " kept, " << summary.bytes_in << " bytes in, " << summary.bytes_out
            << " bytes out, " << summary.files << " file(s)" << std::endl;
}

}  // namespace

int command_quantize(int argc, char** argv) {
  std::string model, output;
  QuantizeCheckpointOptions options;
  OptionSet set("quantize --model DIR --output-dir DIR [options]",
                "Makes a native block-FP8 checkpoint of a bf16, fp16 or fp32 one: e4m3 codes and\n"
                "one scale per 128x128 block for the linears of the decoder; all else is kept.");
  set.add("model", "DIR", "Hugging Face model directory", model);
  set.add("output-dir", "DIR", "made by this command; must not be there", output);
  set.add("power-of-two-scales",
          "scales that are powers of two, as training from the bf16 model makes them; false: "
          "amax / 448, as Hugging Face's converter",
          options.power_of_two_scales);
  add_shard_bytes(set, options.max_shard_bytes);
  if (!set.parse(argc, argv, std::cout))
    return 0;
  check_paths(model, output, options.max_shard_bytes);
  require_one_process("quantize");
  report(quantize_checkpoint(model, output, options), "quantised", output);
  return 0;
}

int command_merge(int argc, char** argv) {
  std::string model, adapter, output;
  MergeOptions options;
  OptionSet set("merge --model DIR --adapter DIR --output-dir DIR [options]",
                "Adds an adapter into its base and writes a plain bf16 model.");
  set.add("model", "DIR", "Hugging Face model directory the adapter was trained on", model);
  set.add("adapter", "DIR", "PEFT adapter directory", adapter);
  set.add("output-dir", "DIR", "made by this command; must not be there", output);
  add_shard_bytes(set, options.max_shard_bytes);
  if (!set.parse(argc, argv, std::cout))
    return 0;
  check_paths(model, output, options.max_shard_bytes);
  ROWSHARD_CHECK(!adapter.empty(), ConfigError,
                 "--adapter is missing: give a PEFT adapter directory");
  require_one_process("merge");
  const MergeSummary summary = merge_checkpoint(model, adapter, output, options);
  report(summary, "merged", output);
  std::cout << "share of the update that bf16 keeps: " << summary.update_kept << std::endl;
  return 0;
}

int command_inspect(int argc, char** argv) {
  std::string path;
  bool json = false;
  OptionSet set("inspect PATH [--json]",
                "Describes a model directory, an adapter directory or a safetensors file.");
  set.positional("PATH", path);
  set.flag("json", "print one JSON object", json);
  if (!set.parse(argc, argv, std::cout))
    return 0;
  require_one_process("inspect");
  const Inspection inspection = inspect(path);
  std::cout << (json ? inspection.json() + "\n" : inspection.text()) << std::flush;
  return 0;
}

}  // namespace rowshard
