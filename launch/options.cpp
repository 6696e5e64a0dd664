#include "options.h"

namespace rowshard {

namespace {

using Default = OptionSet::Default;

void add_model(OptionSet& set, std::string& model) {
  set.add("model", "DIR", "Hugging Face model directory: bf16, fp16, fp32 or native block-FP8",
          model);
}

void add_adapter(OptionSet& set, std::string& adapter) {
  set.add("adapter", "DIR", "PEFT adapter directory; without it the base alone", adapter);
}

void add_execution(OptionSet& set, ExecutionOptions& options) {
  set.section("Base weights");
  set.add_choice("recipe", "block|mx|bf16",
                 "how bf16 weights become FP8: 128x128 blocks, MX groups of 1x32, or not at all; a "
                 "native FP8 checkpoint is used as it is",
                 options.recipe, parse_recipe);
  set.add_choice("columnwise", "release|resident|direct|auto",
                 "the columnwise copy that dgrad reads: made just before and released right after, "
                 "kept, never made, or never made where that is as fast (up to 1,024 tokens)",
                 options.columnwise, parse_columnwise_policy);
  set.add_choice("gemm", "auto|cublaslt|own",
                 "who computes FP8 products on Hopper: whichever was measured faster for the "
                 "shape, cuBLASLt, or our own kernel; docs/kernels.md says what it may change",
                 options.gemm, parse_gemm_backend);
  set.add("gemm-multiprocessors", "N",
          "of those that FP8 products on Hopper may take, to leave some to NCCL; 0 means all",
          options.gemm_multiprocessors);

  set.section("Ranks (dp-replicate x dp-shard x tp = ranks started)");
  set.add("dp-shard", "N", "ranks a copy of the base is sharded over; 0 takes those left over",
          options.dp_shard);
  set.add("dp-replicate", "N", "copies of the sharded base", options.dp_replicate);
  set.add("tp", "N", "tensor-parallel ranks", options.tp);
  set.add("sequence-parallel",
          "with --tp above 1: split activations between layers over the tp ranks",
          options.sequence_parallel);
  set.add("tp-overlap",
          "with --tp above 1: transfers of activations run beside the products; false waits for "
          "each, for comparison, with the same bits",
          options.tp_overlap);
  set.add_choice("tp-sums", "bf16|fp32",
                 "with --tp above 1: what partial products travel in before they are added up",
                 options.tp_sums, parse_sum_dtype);
  set.add_choice(
      "reshard-after-forward", "true|false|N|resident",
      "a unit after its forward: shard again and gather once more in backward, stay "
      "gathered until its backward, shard again over groups of N ranks, or stay gathered "
      "for the whole run",
      options.reshard_after_forward, parse_reshard_after_forward);
  set.add("keep-over-accumulation",
          "with --reshard-after-forward false: units stay gathered from one micro-batch of a step "
          "to the next, and a step gathers each once",
          options.keep_over_accumulation);
  set.add("prefetch", "N", "units gathered ahead of the one that computes, 0 to 8",
          options.prefetch);
  set.add_choice("device", "auto|cuda|host", "where to run; auto takes cuda when a GPU is visible",
                 options.device, parse_device_choice);
  set.add_choice(
      "transport", "peer|nccl|staged|peer-staged",
      "how GPU buffers travel: gathers of the base and exchanges of tensor parallelism by "
      "copy engines between the peers' memories and the rest over NCCL, all over NCCL, "
      "through host memory (slow; ranks may share a GPU), or gathers as peer and the rest as "
      "staged",
      options.transport, parse_transport);
}

void add_cuda_graph(OptionSet& set, bool& cuda_graph) {
  set.add("cuda-graph",
          "record the step of each shape of micro-batch once and replay it: the same bits, less "
          "work for the host (cuda, one rank)",
          cuda_graph);
}

void add_finetune(OptionSet& set, FinetuneOptions& options) {
  set.section("Files");
  add_model(set, options.model);
  set.add("data", "FILE", "token file written by launch/prepare_data.py", options.data);
  set.add("output-dir", "DIR",
          "made if missing; gets metrics.jsonl, adapter/ and resumable checkpoints",
          options.output_dir);

  set.section("Adapter");
  set.add("lora-r", "N", "rank of the adapters", options.lora.r);
  set.add("lora-alpha", "X", "the adapter's output is scaled by alpha / r", options.lora.alpha);
  set.add("lora-dropout", "P", "share of the adapter's inputs that is dropped, 0 to below 1",
          options.lora.dropout);
  set.add("target-modules", "NAMES",
          "which linears get an adapter: all-linear, or names with commas between, as "
          "q_proj,v_proj",
          options.lora.target_modules);

  add_execution(set, options.execution);

  set.section("Memory and speed");
  set.add_choice("recompute", "none|block",
                 "block keeps only the input of each decoder block and runs its forward again in "
                 "backward",
                 options.recompute, parse_recompute);
  add_cuda_graph(set, options.cuda_graph);

  set.section("Batches");
  set.add("micro-batch-size", "N", "sequences a rank computes at once", options.micro_batch_size);
  set.add("grad-accum", "N", "micro-batches of one optimiser step", options.grad_accum);
  set.add("seq-len", "N", "tokens a sequence; 0 means the model's maximum, at most 1024",
          options.seq_len);
  set.add("packing", "put several samples into a sequence; they do not see each other",
          options.packing);
  set.add("pad-to", "N",
          "pad each micro-batch to a multiple of N tokens, and those that go through the head too, "
          "so that few shapes occur for --cuda-graph; 1 does not",
          options.pad_to);

  set.section("Optimiser");
  set.add("max-steps", "N", "optimiser steps; excludes --epochs", options.max_steps,
          Default::kHidden);
  set.add("epochs", "N", "passes over the data; excludes --max-steps", options.epochs);
  set.exclusive("max-steps", "epochs");
  set.add("lr", "X", "highest learning rate", options.lr);
  set.add_choice("lr-schedule", "cosine|linear|constant", "its course after the warm-up",
                 options.lr_schedule, parse_lr_schedule);
  set.add("warmup-steps", "N", "optimiser steps of linear warm-up from 0", options.warmup_steps);
  set.add("weight-decay", "X", "AdamW's decoupled decay, times the learning rate a step",
          options.weight_decay);
  set.add("clip-norm", "X", "highest global gradient norm; 0 never clips", options.clip_norm);
  set.add("seed", "N", "of initial adapters, data order and dropout", options.seed);

  set.section("Evaluation and checkpoints");
  set.add("eval-data", "FILE", "token file of held-out samples", options.eval_data);
  set.add("eval-every", "N",
          "optimiser steps between evaluations; 0: before the first and after the last step only",
          options.eval_every);
  set.add("save-every", "N",
          "optimiser steps between resumable checkpoints; 0: after the last step only",
          options.save_every);
  set.add("keep", "N", "resumable checkpoints kept, the newest", options.keep);
  set.add("resume", "auto|DIR|none",
          "go on from the newest checkpoint under --output-dir if there is one, from this "
          "checkpoint, or start anew",
          options.resume);

  set.section("Trace and trial");
  set.add("trace", "FILE",
          "timeline of gathers, rebuilds, GEMMs and reductions of the first four steps, Chrome's "
          "format; with several ranks one file each, FILE with .rankN before its ending",
          options.trace);
}

void add_batches(OptionSet& set, int64_t& micro_batch_size, int64_t& seq_len, bool& packing) {
  set.section("Batches");
  set.add("micro-batch-size", "N", "sequences a rank computes at once", micro_batch_size);
  set.add("seq-len", "N", "tokens a sequence; 0 means the model's maximum, at most 1024", seq_len);
  set.add("packing", "put several samples into a sequence; they do not see each other", packing);
}

}  // namespace

bool parse_options(int argc, char** argv, std::ostream& out, FinetuneOptions& options) {
  OptionSet set("finetune --model DIR --data FILE --output-dir DIR [options]",
                "Fine-tunes LoRA adapters on a frozen base held once, in FP8, sharded over the\n"
                "ranks. Start it alone, or on every rank by mpirun, torchrun --no-python or srun.");
  add_finetune(set, options);
  set.flag("dry-run", "load and check everything, then end without a step or a file",
           options.dry_run);
  if (!set.parse(argc, argv, out))
    return false;
  check(options);
  return true;
}

bool parse_options(int argc, char** argv, std::ostream& out, PlanOptions& options) {
  OptionSet set("plan --model DIR [options of finetune] [--json]",
                "Prints the usage plan of a step and the bytes of each category on each rank,\n"
                "without running anything.");
  add_finetune(set, options.finetune);
  set.flag("json", "print one JSON object", options.json);
  if (!set.parse(argc, argv, out))
    return false;
  check(options);
  return true;
}

bool parse_options(int argc, char** argv, std::ostream& out, EvaluateOptions& options) {
  OptionSet set("evaluate --model DIR [--adapter DIR] --data FILE [options]",
                "Prints the mean loss, the perplexity and the number of trained tokens of a token\n"
                "file.");
  set.section("Files");
  add_model(set, options.model);
  add_adapter(set, options.adapter);
  set.add("data", "FILE", "token file written by launch/prepare_data.py", options.data);
  set.flag("json", "print one JSON object", options.json);
  add_execution(set, options.execution);
  add_batches(set, options.micro_batch_size, options.seq_len, options.packing);
  if (!set.parse(argc, argv, out))
    return false;
  check(options);
  return true;
}

bool parse_options(int argc, char** argv, std::ostream& out, GenerateOptions& options) {
  OptionSet set(
      "generate --model DIR [--adapter DIR] --prompt TEXT|--prompt-ids 1,2,3 [options]",
      "Continues a prompt greedily and prints the new ids, and their text when the prompt\n"
      "was text.");
  set.section("Files");
  add_model(set, options.model);
  add_adapter(set, options.adapter);
  set.section("Prompt");
  set.add("prompt", "TEXT",
          "text; the model's tokenizer runs in the Python environment that launch/setup makes",
          options.prompt);
  set.flag("chat", "TEXT is a user's turn: put it through the model's chat template", options.chat);
  set.add("prompt-ids", "IDS", "token ids with commas between, taken as they are",
          options.prompt_ids);
  set.exclusive("prompt", "prompt-ids");
  set.add("max-new-tokens", "N", "stop after so many, or at the model's end-of-text token",
          options.max_new_tokens);
  set.flag("json", "print one JSON object", options.json);
  add_execution(set, options.execution);
  if (!set.parse(argc, argv, out))
    return false;
  check(options);
  return true;
}

bool parse_options(int argc, char** argv, std::ostream& out, StepBenchOptions& options,
                   std::string& json) {
  OptionSet set(
      "bench step [options]",
      "A training step of a model of these sizes with random weights, on all ranks: what\n"
      "it takes, and what its gathers and its reduction add to it.");
  set.section("Model");
  ModelConfig& model = options.model;
  set.add("hidden", "N", "hidden size", model.hidden_size);
  set.add("intermediate", "N", "hidden size of the feed-forward part", model.intermediate_size);
  set.add("layers", "N", "decoder blocks", model.layers);
  set.add("heads", "N", "attention heads", model.heads);
  set.add("kv-heads", "N", "heads of keys and values", model.kv_heads);
  set.add("head-dim", "N", "size of a head", model.head_dim);
  set.add("vocabulary", "N", "rows of embedding and head", model.vocab_size);
  set.section("Step");
  set.add("tokens", "N", "tokens a rank computes at once", options.tokens);
  set.add("grad-accum", "N", "micro-batches of one optimiser step", options.grad_accum);
  set.add("lora-r", "N", "rank of the adapters", options.lora.r);
  set.add_choice("recompute", "none|block",
                 "block keeps only the input of each decoder block and runs its forward again in "
                 "backward",
                 options.recompute, parse_recompute);
  add_cuda_graph(set, options.cuda_graph);
  set.add("steps", "N", "timed steps; the median counts", options.steps);
  set.add("baseline",
          "measure the same step with every unit resident too, or without graphs, in turns",
          options.baseline);
  set.add("json", "FILE", "write the figures there too", json);
  set.add("trace", "FILE", "timeline of one step more, Chrome's format", options.trace);
  add_execution(set, options.execution);
  if (!set.parse(argc, argv, out))
    return false;
  check(options);
  return true;
}

}  // namespace rowshard
