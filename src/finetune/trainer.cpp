#include "finetune/trainer.h"

#include <algorithm>
#include <cmath>

#include "finetune/generate.h"
#include "finetune/options_text.h"
#include "finetune/run_checkpoint.h"
#include "finetune/trace_file.h"

namespace rowshard {

BatchOptions batch_options(const FinetuneOptions& options, int data_ranks, int64_t seq_len) {
  BatchOptions batches;
  batches.seq_len = seq_len;
  batches.packing = options.packing;
  batches.micro_batch_size = options.micro_batch_size;
  batches.grad_accum = options.grad_accum;
  batches.dp_size = data_ranks;
  batches.seed = options.seed;
  batches.pad_multiple = std::max<int64_t>(options.execution.tp, options.pad_to);
  batches.head_multiple = options.pad_to;
  return batches;
}

AdapterConfig adapter_config(const FinetuneOptions& options) {
  AdapterConfig config;
  config.r = static_cast<int>(options.lora.r);
  config.alpha = options.lora.alpha;
  config.dropout = options.lora.dropout;
  config.target_modules = options.lora.target_modules;
  config.base_model = options.model;
  return config;
}

Trainer::Trainer(Job& job, const FinetuneOptions& options, const TokenFile& data)
    : job_(job),
      options_(options),
      batches_(
          data,
          batch_options(options, job.data_size(), resolve_seq_len(options.seq_len, job.config())),
          job.config().max_position_embeddings),
      max_steps_(options.max_steps > 0 ? options.max_steps
                                       : batches_.steps_for_epochs(options.epochs)),
      schedule_(options.lr_schedule, options.lr, options.warmup_steps, max_steps_) {
  Context& ctx = job.context();
  adapters_ = std::make_unique<AdapterSet>(job.config(), adapter_config(options), job.data_size(),
                                           job.model().options().activations, options.seed, ctx,
                                           job.model().slice());
  optimizer_ =
      std::make_unique<AdapterOptimizer>(*adapters_, job.reduce_group(), options.weight_decay,
                                         options.clip_norm, ctx, job.tensor_parallel_groups());
  loss_sum_ = job.arena().tensor(Category::kOptimizer, "loss_sum", DType::kF64, {1});
  if (options.cuda_graph)
    graphs_.emplace(job, *adapters_, *optimizer_, loss_sum_);
}

StepMetrics Trainer::train_step(Follows follows) {
  Context& ctx = job_.context();
  const double begin = now_seconds();
  const int64_t wire = job_.wire_bytes();
  job_.model().scheduler().reset_exposed();
  TensorParallel* tp = job_.tensor_parallel();
  if (tp)
    tp->waits.reset();
  const int64_t valid = batches_.valid_tokens(position_);
  fill_bytes(adapters_->gradients(), 0, ctx.stream);
  fill_bytes(loss_sum_, 0, ctx.stream);
  for (int64_t k = 0; k < options_.grad_accum; ++k) {
    const MicroBatch host = batches_.micro_batch(position_, job_.data_rank(), k);
    Dropout dropout;
    dropout.rate = static_cast<float>(options_.lora.dropout);
    dropout.random.seed = options_.seed;
    // One range of streams for each (step, accumulation, rank); the model offsets it per adapter.
    const uint64_t slot =
        (uint64_t(step_) * options_.grad_accum + k) * job_.data_size() + job_.data_rank();
    dropout.random.stream = (slot + 1) << 20;
    const double scale = valid > 0 ? 1.0 / valid : 0.0;
    if (graphs_) {
      graphs_->train(host, scale, dropout);  // leaves nothing for what follows
      continue;
    }
    const DeviceBatch batch = job_.model().batch(host.input_ids, host.labels, host.cu_seqlens);
    job_.model().train(batch, *adapters_, scale, loss_sum_, dropout,
                       k + 1 < options_.grad_accum ? Follows::kMicroBatch : follows);
  }
  StepMetrics metrics;
  metrics.lr = schedule_.lr(step_ + 1);
  if (graphs_) {
    graphs_->update(metrics.lr, step_ + 1);
  } else {
    optimizer_->update(metrics.lr, step_ + 1);
  }
  metrics.grad_norm = optimizer_->gradient_norm();
  ROWSHARD_CHECK(std::isfinite(metrics.grad_norm), Error, "step ", step_ + 1,
                 ": the gradient norm is ", metrics.grad_norm,
                 "; nothing was updated. Lower --lr, or look for samples that break the loss");
  metrics.loss = job_.reduce_sum(loss_sum_) / static_cast<double>(std::max<int64_t>(1, valid));
  metrics.step = ++step_;
  position_ = batches_.advance(position_);
  metrics.tokens = valid;
  const double seconds = now_seconds() - begin;
  metrics.step_ms = seconds * 1e3;
  metrics.tokens_per_second = valid / seconds;
  metrics.exposed_comm_ms = (job_.model().scheduler().exposed_seconds() +
                             optimizer_->reduction_seconds() + (tp ? tp->waits.seconds() : 0)) *
                            1e3;
  metrics.wire_bytes = job_.wire_bytes() - wire;
  job_.arena().mark_steady();
  return metrics;
}

namespace {

EvalMetrics evaluate_all(Job& job, const EvalBatches& batches, const AdapterSet* adapters,
                         int64_t step) {
  Context& ctx = job.context();
  Tensor loss_sum = job.arena().tensor(Category::kWorkspace, "eval.loss_sum", DType::kF64, {1});
  fill_bytes(loss_sum, 0, ctx.stream);
  for (int64_t i = 0; i < batches.count(); ++i) {
    const MicroBatch host = batches.micro_batch(i, job.data_rank());
    const DeviceBatch batch = job.model().batch(host.input_ids, host.labels, host.cu_seqlens);
    job.model().evaluate(batch, adapters, loss_sum,
                         i + 1 < batches.count() ? Follows::kMicroBatch : Follows::kNothing);
  }
  EvalMetrics metrics;
  metrics.step = step;
  metrics.eval_tokens = batches.valid_tokens();
  metrics.eval_loss = job.reduce_sum(loss_sum) / static_cast<double>(batches.valid_tokens());
  return metrics;
}

}  // namespace

EvalMetrics Trainer::evaluate(const EvalBatches& batches) {
  return evaluate_all(job_, batches, adapters_.get(), step_);
}

void Trainer::save_adapter(const std::filesystem::path& directory) {
  const std::vector<float> full = job_.full_vector(*adapters_, adapters_->parameters());
  if (job_.world().rank() == 0)
    adapters_->save(directory, full);
}

namespace {

// A trace is to be looked at: the first steps show what the others do.
constexpr int64_t kTracedSteps = 4;

std::string describe_counts(const Batches& batches) {
  return message(batches.samples(), " samples, ", batches.rows(0), " rows an epoch",
                 batches.usable().too_long + batches.usable().untrained > 0
                     ? message(" (", batches.usable().too_long + batches.usable().untrained,
                               " samples left out: too long or untrained)")
                     : std::string());
}

}  // namespace

void run_finetune(World& world, const FinetuneOptions& options, Reporter& reporter) {
  check(options);
  Job job(world, options.model, options.execution, options.recompute, to_text(options));
  const TokenFile data = TokenFile::open(options.data, job.config().vocab_size);
  std::optional<TokenFile> eval_data;
  if (!options.eval_data.empty()) {
    eval_data = TokenFile::open(options.eval_data, job.config().vocab_size);
  }
  Trainer trainer(job, options, data);
  std::optional<EvalBatches> eval;
  if (eval_data) {
    eval.emplace(*eval_data, trainer.batches().options(), job.config().max_position_embeddings);
  }
  reporter.line(message("model ", options.model, " on ", world.size(), " rank(s), ",
                        to_string(world.device()), "; ", describe_counts(trainer.batches()), "; ",
                        trainer.max_steps(), " steps; ", trainer.adapters().trainable(),
                        " trainable parameters"));
  job.load();
  if (options.dry_run) {
    reporter.line("dry run: everything loads; no step was run");
    return;
  }
  const std::filesystem::path output(options.output_dir);
  const bool writer = world.rank() == 0;
  if (writer)
    std::filesystem::create_directories(output);
  const std::optional<std::filesystem::path> resume_from =
      checkpoint_to_resume(options.resume, output);
  if (resume_from) {
    trainer.resume(*resume_from);
    reporter.line(message("resumed after step ", trainer.step(), " from ", resume_from->string()));
  }
  std::optional<MetricsWriter> metrics;
  if (writer)
    metrics.emplace(output / "metrics.jsonl", trainer.step());

  const auto evaluate = [&] {
    if (!eval)
      return;
    const EvalMetrics result = trainer.evaluate(*eval);
    if (metrics)
      metrics->write(result);
    reporter.eval(result);
  };
  if (!resume_from)
    evaluate();
  std::optional<Trace> trace;
  const int64_t first_traced = trainer.step();
  if (!options.trace.empty())
    trace.emplace(job.context().stream);
  while (trainer.step() < trainer.max_steps()) {
    const int64_t next = trainer.step() + 1;
    const bool last = next == trainer.max_steps();
    const bool evaluates = last || (options.eval_every > 0 && next % options.eval_every == 0);
    const StepMetrics step =
        trainer.train_step(last || (evaluates && eval) ? Follows::kNothing : Follows::kStep);
    if (metrics)
      metrics->write(step, job.arena());
    ProgressState progress;
    progress.step = step.step;
    progress.max_steps = trainer.max_steps();
    progress.loss = step.loss;
    progress.tokens_per_second = step.tokens_per_second;
    progress.seconds_per_step = step.step_ms / 1e3;
    reporter.step(step, progress);
    if (trace && trainer.step() >= first_traced + kTracedSteps) {
      write_trace(*trace, options.trace, world);
      trace.reset();
    }
    if (evaluates)
      evaluate();
    if (last || (options.save_every > 0 && step.step % options.save_every == 0)) {
      trainer.save(output / message("checkpoint-", step.step));
      if (writer)
        keep_newest_checkpoints(output, options.keep);
    }
  }
  if (trace)
    write_trace(*trace, options.trace, world);
  trainer.save_adapter(output / "adapter");
  world.barrier();
  reporter.line(job.arena().table());
  reporter.line(message("adapter: ", (output / "adapter").string()));
}

EvalMetrics run_evaluate(World& world, const EvaluateOptions& options, Reporter&) {
  check(options);
  Job job(world, options.model, options.execution, Recompute::kNone, to_text(options));
  const TokenFile data = TokenFile::open(options.data, job.config().vocab_size);
  std::unique_ptr<AdapterSet> adapters;
  if (!options.adapter.empty())
    adapters = adapters_from(job, options.adapter);
  BatchOptions batches;
  batches.seq_len = resolve_seq_len(options.seq_len, job.config());
  batches.packing = options.packing;
  batches.micro_batch_size = options.micro_batch_size;
  batches.dp_size = job.data_size();
  batches.pad_multiple = job.pad_multiple();
  const EvalBatches eval(data, batches, job.config().max_position_embeddings);
  job.load();
  return evaluate_all(job, eval, adapters.get(), 0);
}

}  // namespace rowshard
