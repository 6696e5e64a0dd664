#include "finetune/options_text.h"

#include "core/error.h"

namespace rowshard {

std::string to_text(const ExecutionOptions& o) {
  return message("recipe ", to_string(o.recipe), " dp_shard ", o.dp_shard, " dp_replicate ",
                 o.dp_replicate, " tp ", o.tp, " sequence_parallel ", o.sequence_parallel,
                 " tp_overlap ", o.tp_overlap, " tp_sums ", to_string(o.tp_sums), " reshard ",
                 to_string(o.reshard_after_forward), " keep ", o.keep_over_accumulation,
                 " columnwise ", to_string(o.columnwise), " gemm ", to_string(o.gemm), " ",
                 o.gemm_multiprocessors, " prefetch ", o.prefetch, " device ", to_string(o.device));
}

std::string to_text(const FinetuneOptions& o) {
  std::string targets;
  for (const std::string& target : o.lora.target_modules)
    targets.append(1, ' ').append(target);
  return message("model ", o.model, " data ", o.data, " output ", o.output_dir, " lora r ",
                 o.lora.r, " alpha ", o.lora.alpha, " dropout ", o.lora.dropout, " targets",
                 targets, " ", to_text(o.execution), " recompute ", to_string(o.recompute),
                 " cuda_graph ", o.cuda_graph, " pad_to ", o.pad_to, " micro_batch ",
                 o.micro_batch_size, " accum ", o.grad_accum, " seq_len ", o.seq_len, " packing ",
                 o.packing, " steps ", o.max_steps, " epochs ", o.epochs, " lr ", o.lr, " ",
                 to_string(o.lr_schedule), " warmup ", o.warmup_steps, " decay ", o.weight_decay,
                 " clip ", o.clip_norm, " eval ", o.eval_data, " every ", o.eval_every, " save ",
                 o.save_every, " keep ", o.keep, " resume ", o.resume, " seed ", o.seed,
                 " dry_run ", o.dry_run);
}

std::string to_text(const EvaluateOptions& o) {
  return message("model ", o.model, " adapter ", o.adapter, " data ", o.data, " ",
                 to_text(o.execution), " micro_batch ", o.micro_batch_size, " seq_len ", o.seq_len,
                 " packing ", o.packing);
}

std::string to_text(const GenerateOptions& o) {
  std::string ids;
  for (int64_t id : o.prompt_ids)
    ids += message(" ", id);
  return message("model ", o.model, " adapter ", o.adapter, " prompt ", o.prompt, " ids", ids, " ",
                 to_text(o.execution), " new ", o.max_new_tokens);
}

}  // namespace rowshard
