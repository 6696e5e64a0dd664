#include "finetune/memory_plan.h"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "comm/mesh.h"
#include "comm/plan_communicator.h"
#include "finetune/adapter_optimizer.h"
#include "finetune/batches.h"
#include "finetune/job.h"
#include "finetune/trainer.h"

namespace rowshard {

namespace {

// Adds a micro-batch unless one there outdoes it; drops those it outdoes. What a step holds grows
// with tokens and with labels, and cuda pads tokens that are no multiple of 8 into scratch, so no
// single micro-batch of a run need be the largest.
void keep_largest(std::vector<MicroBatch>& largest, MicroBatch batch) {
  const auto within = [](const MicroBatch& a, const MicroBatch& b) {
    return a.tokens() <= b.tokens() && a.head_tokens <= b.head_tokens &&
           (a.tokens() % 8 == 0 || b.tokens() % 8 != 0);
  };
  for (const MicroBatch& other : largest) {
    if (within(batch, other))
      return;
  }
  std::erase_if(largest, [&](const MicroBatch& other) { return within(other, batch); });
  largest.push_back(std::move(batch));
}

struct PlannedBatches {
  std::vector<MicroBatch> largest;  // of the run
  std::vector<MicroBatch> step;     // one rank's of the first step
};

// From the data, or full ones.
PlannedBatches planned_batches(const FinetuneOptions& options, const ModelConfig& config,
                               int data_ranks) {
  const int64_t seq_len = resolve_seq_len(options.seq_len, config);
  if (!options.data.empty()) {
    const TokenFile file = TokenFile::open(options.data, config.vocab_size);
    const Batches batches(file, batch_options(options, data_ranks, seq_len),
                          config.max_position_embeddings);
    PlannedBatches planned;
    DataPosition position;
    for (int64_t k = 0; k < options.grad_accum; ++k)
      planned.step.push_back(batches.micro_batch(position, 0, k));
    const int64_t steps =
        options.max_steps > 0 ? options.max_steps : batches.steps_for_epochs(options.epochs);
    for (int64_t step = 0; step < steps; ++step) {
      for (int rank = 0; rank < data_ranks; ++rank) {
        for (int64_t k = 0; k < options.grad_accum; ++k) {
          keep_largest(planned.largest, batches.micro_batch(position, rank, k));
        }
      }
      position = batches.advance(position);
    }
    return planned;
  }
  MicroBatch full;
  for (int64_t row = 0; row <= options.micro_batch_size; ++row) {
    full.cu_seqlens.push_back(static_cast<int32_t>(row * seq_len));
  }
  full.input_ids.assign(options.micro_batch_size * seq_len, 0);
  full.labels = full.input_ids;
  full.valid_tokens = full.head_tokens = full.tokens();
  // As Batches pads: a segment of its own, without labels.
  const int64_t padded =
      round_up(full.tokens(), batch_options(options, data_ranks, seq_len).pad_multiple);
  full.padding = padded - full.tokens();
  if (full.padding > 0) {
    full.input_ids.resize(padded, 0);
    full.labels.resize(padded, kIgnoreLabel);
    full.cu_seqlens.push_back(static_cast<int32_t>(padded));
  }
  return {{full}, std::vector<MicroBatch>(options.grad_accum, full)};
}

int64_t base_parameters(const std::vector<UnitLayout>& units) {
  int64_t count = 0;
  for (const UnitLayout& unit : units) {
    for (const WeightSpec& weight : unit.weights())
      count += weight.elements();
  }
  return count;
}

std::vector<ProductPlan> planned_products(const std::vector<UnitLayout>& units, int64_t tokens,
                                          ColumnwisePolicy policy) {
  std::vector<ProductPlan> products;
  for (const UnitLayout& unit : units) {
    for (const WeightSpec& weight : unit.weights()) {
      if (weight.storage != Storage::kFp8Block)
        continue;
      const int64_t n = weight.shape[0], k = weight.shape[1];
      auto at = std::ranges::find_if(
          products, [&](const ProductPlan& known) { return known.n == n && known.k == k; });
      if (at == products.end()) {
        const std::string dgrad = to_string(gemm_backend_of(tokens, k, n));
        const bool direct = policy == ColumnwisePolicy::kDirect ||
                            (policy == ColumnwisePolicy::kAuto && tokens <= kDirectTokens);
        products.push_back({n, k, 0, to_string(gemm_backend_of(tokens, n, k)),
                            direct                                  ? "direct"
                            : policy == ColumnwisePolicy::kResident ? dgrad
                                                                    : "rebuild, " + dgrad});
        at = products.end() - 1;
      }
      ++at->weights;
    }
  }
  return products;
}

}  // namespace

MemoryPlan plan_memory(const FinetuneOptions& options, DeviceKind device) {
  return plan_memory(ModelConfig::load(options.model), options, device);
}

MemoryPlan plan_memory(const ModelConfig& config, const FinetuneOptions& options,
                       DeviceKind device) {
  const ExecutionOptions& execution = options.execution;
  const int dp_shard = std::max(1, execution.dp_shard);
  const Mesh mesh = make_mesh(dp_shard * execution.dp_replicate * execution.tp,
                              execution.dp_replicate, dp_shard, execution.tp);
  // Scratch differs between the devices: index 1 stands for cuda (core/matmul.h).
  const Device plan_device{DeviceKind::kPlan, device == DeviceKind::kCuda ? 1 : 0};
  Arena arena(plan_device);
  Stream stream(plan_device);
  Context ctx{arena, stream};
  PlanCommunicator gather("gather", mesh.dp_shard, 0, plan_device);
  PlanCommunicator reduce("reduce", mesh.data_parallel(), 0, plan_device);

  const std::vector<int> again =
      regather_ranks(execution.reshard_after_forward, gather.members(), 0);
  PlanCommunicator regather("regather", std::max(1, static_cast<int>(again.size())), 0,
                            plan_device);
  const DecoderOptions decoder = decoder_options(execution, options.recompute, device);
  PlanCommunicator tp("tp", mesh.tp, 0, plan_device);
  Stream tp_stream(plan_device, "tp");
  std::optional<TensorParallel> parallel;
  if (mesh.tp > 1) {
    parallel.emplace(TensorParallel{tp,
                                    tp_stream,
                                    execution.sequence_parallel,
                                    execution.tp_overlap,
                                    execution.tp_sums == SumDType::kFp32,
                                    {}});
  }
  DecoderModel model(config, decoder, gather, ctx, again.empty() ? nullptr : &regather,
                     parallel ? &*parallel : nullptr);
  PlanCommunicator kv("kv", model.slice().kv_replicas, 0, plan_device);
  TensorParallelGroups groups;
  if (parallel)
    groups = {&tp, model.slice().kv_replicas > 1 ? &kv : nullptr, parallel->sequence};
  AdapterSet adapters(config, adapter_config(options), mesh.data_parallel(),
                      model.options().activations, options.seed, ctx, model.slice());
  AdapterOptimizer optimizer(adapters, reduce, options.weight_decay, options.clip_norm, ctx,
                             groups);
  Tensor loss_sum = arena.tensor(Category::kOptimizer, "loss_sum", DType::kF64, {1});

  const PlannedBatches batches = planned_batches(options, config, mesh.data_parallel());
  MemoryPlan plan;
  arena.reset_peak();
  const auto train = [&](const MicroBatch& host, Follows follows) {
    const DeviceBatch batch = model.batch(host.input_ids, host.labels, host.cu_seqlens);
    model.train(batch, adapters, 1.0, loss_sum, Dropout{}, follows);
  };
  // A step between others: what it begins with was left by the one before. Recorded passes leave
  // nothing.
  const Follows next =
      options.cuda_graph || options.max_steps == 1 ? Follows::kNothing : Follows::kStep;
  const Follows within = options.cuda_graph ? Follows::kNothing : Follows::kMicroBatch;
  for (const MicroBatch& host : batches.largest) {
    plan.tokens = std::max(plan.tokens, host.tokens());
    if (options.grad_accum > 1)
      train(host, within);
    train(host, next);
  }
  regather.reset_wire_bytes();
  gather.reset_wire_bytes();  // what is gathered once for the run is there by now
  tp.reset_wire_bytes();
  // Units have one size; activations that travel have those of the micro-batch.
  for (size_t k = 0; k < batches.step.size(); ++k) {
    train(batches.step[k], k + 1 < batches.step.size() ? within : next);
  }
  plan.wire_bytes = gather.wire_bytes() + regather.wire_bytes() + tp.wire_bytes();
  reduce.reset_wire_bytes();
  tp.reset_wire_bytes();
  kv.reset_wire_bytes();
  optimizer.update(0, 1);
  reduce.all_reduce(loss_sum, Reduction::kSum, stream);
  plan.wire_bytes += reduce.wire_bytes() + tp.wire_bytes() + kv.wire_bytes();
  model.scheduler().drop_left();  // as after the last step

  plan.ranks = mesh.size();
  plan.trainable = adapters.trainable();
  plan.units = model.units().layouts();
  plan.base_parameters =
      base_parameters(DecoderUnits(config, DecoderSlice::whole(config), Storage::kPlain,
                                   model.options().activations, mesh.dp_shard)
                          .layouts());
  plan.usage = model.training_plan(adapters.lowest_block(), options.grad_accum > 1 ? within : next);
  const auto planned = [](const CategoryBytes& bytes) {
    return CategoryPlan{bytes.now, bytes.peak};
  };
  for (int i = 0; i < kCategoryCount; ++i) {
    plan.categories[i] = planned(arena.bytes(static_cast<Category>(i)));
  }
  plan.total = planned(arena.total());
  if (device == DeviceKind::kCuda)
    plan.products = planned_products(plan.units, plan.tokens, model.options().columnwise);
  return plan;
}

std::string to_table(const MemoryPlan& plan, bool with_usage) {
  std::ostringstream out;
  if (with_usage)
    out << plan.usage.table(plan.units) << "\n";
  out << plan.base_parameters << " base parameters, " << plan.trainable << " trainable, over "
      << plan.ranks << " rank(s); largest micro-batch " << plan.tokens << " tokens\n"
      << "bytes on each rank:\n"
      << std::left << std::setw(16) << "category" << std::right << std::setw(16) << "steady"
      << std::setw(16) << "peak"
      << "\n";
  const auto row = [&out](const char* name, const CategoryPlan& bytes) {
    out << std::left << std::setw(16) << name << std::right << std::setw(16) << bytes.steady
        << std::setw(16) << bytes.peak << "\n";
  };
  for (int i = 0; i < kCategoryCount; ++i) {
    row(to_string(static_cast<Category>(i)), plan.categories[i]);
  }
  row("total", plan.total);
  out << "received over the wire in a step: " << plan.wire_bytes << " bytes\n";
  if (!plan.products.empty())
    out << "FP8 products at " << plan.tokens << " tokens (--gemm, --columnwise):\n";
  for (const ProductPlan& product : plan.products) {
    out << "  [" << product.n << ", " << product.k << "] x " << product.weights << ": fprop "
        << product.fprop << "; dgrad " << product.dgrad << "\n";
  }
  return out.str();
}

std::string to_json(const MemoryPlan& plan) {
  nlohmann::ordered_json json;
  json["ranks"] = plan.ranks;
  json["base_parameters"] = plan.base_parameters;
  json["trainable_parameters"] = plan.trainable;
  json["tokens"] = plan.tokens;
  const auto bytes = [](const CategoryPlan& category) {
    return nlohmann::ordered_json{{"steady", category.steady}, {"peak", category.peak}};
  };
  for (int i = 0; i < kCategoryCount; ++i) {
    json["memory"][to_string(static_cast<Category>(i))] = bytes(plan.categories[i]);
  }
  json["memory"]["total"] = bytes(plan.total);
  json["wire_bytes"] = plan.wire_bytes;
  for (const ProductPlan& product : plan.products) {
    json["products"].push_back({{"n", product.n},
                                {"k", product.k},
                                {"weights", product.weights},
                                {"fprop", product.fprop},
                                {"dgrad", product.dgrad}});
  }
  for (const PlanStep& step : plan.usage.steps) {
    nlohmann::ordered_json entry;
    entry["unit"] = plan.units[step.use.unit].name();
    entry["pass"] = to_string(step.use.pass);
    entry["gather"] = step.gather;
    entry["prefetch"] = nlohmann::ordered_json::array();
    for (int unit : step.prefetch)
      entry["prefetch"].push_back(plan.units[unit].name());
    entry["after"] = after(step);
    json["usage"].push_back(std::move(entry));
  }
  // What the step before has gathered already, and what this one leaves for the next.
  json["opening"] = nlohmann::ordered_json::array();
  for (const int unit : plan.usage.opening)
    json["opening"].push_back(plan.units[unit].name());
  return json.dump(2);
}

}  // namespace rowshard
