// Fine-tuning runs of the tiny golden models, for tests: token files made here, options, and what a
// run leaves, to be compared bit for bit.
#pragma once

#include <gtest/gtest.h>

#include "finetune/options_text.h"
#include "finetune/trainer.h"
#include "unit/model/file_fixture.h"

namespace rowshard::testing {

inline std::string golden_model(const std::string& name) {
  return std::string(ROWSHARD_SOURCE_DIR) + "/tests/parity/golden/" + name;
}

/// `samples` arithmetic sequences of 5 … 21 tokens with a prompt that is not trained on: something
/// a few steps can learn. Every length and every number of labels differs from its neighbours', and
/// the longest have few labels.
inline void write_tokens(const std::filesystem::path& path, int samples, int vocabulary = 131) {
  std::vector<int32_t> ids, labels;
  std::vector<int64_t> offsets{0};
  for (int s = 0; s < samples; ++s) {
    const int length = 5 + s * 7 % 17;
    const int prompt = length == 21 ? 18 : 2 + s % 3;
    for (int i = 0; i < length; ++i) {
      ids.push_back((3 * s + (1 + s % 3) * i) % vocabulary);
      labels.push_back(i < prompt ? kIgnoreLabel : ids.back());
    }
    offsets.push_back(static_cast<int64_t>(ids.size()));
  }
  const auto count = static_cast<int64_t>(ids.size());
  write_tensors(path,
                {named("input_ids", "I32", {count}, ids), named("labels", "I32", {count}, labels),
                 named("sample_offsets", "I64", {samples + 1}, offsets)},
                {{"format", "rowshard.tokens"}, {"version", "1"}});
}

/// A global batch of 12 rows over `ranks`, and clipping that bites. No warm-up: its first step
/// changes nothing, and until B is not zero A has no gradient.
inline FinetuneOptions tiny_options(const std::string& model, const std::filesystem::path& data,
                                    int ranks, Device device) {
  FinetuneOptions options;
  options.model = golden_model(model);
  options.data = data.string();
  options.output_dir = (data.parent_path() / "out").string();
  options.lora.r = 4;
  options.lora.alpha = 8;
  options.execution.dp_shard = ranks;
  options.execution.device = device.is_cuda() ? DeviceChoice::kCuda : DeviceChoice::kHost;
  options.micro_batch_size = 1;
  options.grad_accum = 12 / ranks;
  options.packing = false;
  options.max_steps = 20;
  options.lr = 1e-2;
  options.weight_decay = 0.01;
  return options;
}

inline bool shares_gpu(const World& world) {
  return world.device().is_cuda() && world.size() > 1 && is_staged(world.transport());
}

/// A job whose arena is poisoned, loaded and ready for its first step.
struct TinyRun {
  Job job;
  TokenFile data;
  Trainer trainer;

  TinyRun(World& world, const FinetuneOptions& options)
      : job(world, options.model, options.execution, options.recompute, to_text(options)),
        data(TokenFile::open(options.data, job.config().vocab_size)),
        trainer(job, options, data) {
    // Poisoning waits for the device twice an allocation, and ranks that share one for each other.
    job.arena().set_poison(!shares_gpu(world));
    job.load();
    job.arena().reset_peak();
  }

  std::vector<float> download(const ConstView& flat) {
    std::vector<float> values(flat.elements());
    copy(View(values.data(), DType::kF32, flat.shape, kHost), flat, job.context().stream);
    job.context().stream.synchronize();
    return values;
  }
  int64_t now(Category category) { return job.arena().bytes(category).now; }
};

/// What training left: per step the loss and the gradient's norm, then this rank's own gradients
/// and the parameters.
struct Curve {
  std::vector<double> losses, norms;
  std::vector<float> gradients, parameters;
  bool operator==(const Curve&) const = default;
};

inline void continue_curve(Curve& curve, TinyRun& run, int steps) {
  for (int i = 0; i < steps; ++i) {
    const StepMetrics metrics =
        run.trainer.train_step(i + 1 < steps ? Follows::kStep : Follows::kNothing);
    curve.losses.push_back(metrics.loss);
    curve.norms.push_back(metrics.grad_norm);
  }
  curve.gradients = run.download(run.trainer.adapters().gradients());
  curve.parameters = run.download(run.trainer.adapters().parameters());
}

inline Curve train(World& world, const FinetuneOptions& options, int steps) {
  TinyRun run(world, options);
  Curve curve;
  continue_curve(curve, run, steps);
  return curve;
}

/// The first difference, for a message; empty when all bits agree.
inline std::string difference(const Curve& a, const Curve& b) {
  const auto first = [](const char* what, const auto& x, const auto& y) -> std::string {
    if (x.size() != y.size())
      return message(what, ": ", x.size(), " and ", y.size(), " elements");
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::memcmp(&x[i], &y[i], sizeof x[i]) != 0)
        return message(what, " ", i, ": ", x[i], " and ", y[i]);
    }
    return "";
  };
  for (const std::string& text :
       {first("loss", a.losses, b.losses), first("norm", a.norms, b.norms),
        first("gradient", a.gradients, b.gradients),
        first("parameter", a.parameters, b.parameters)}) {
    if (!text.empty())
      return text;
  }
  return "";
}

inline double largest_relative_difference(const std::vector<double>& a,
                                          const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return largest;
}

}  // namespace rowshard::testing
