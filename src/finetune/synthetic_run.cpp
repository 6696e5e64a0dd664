#include "finetune/synthetic_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "finetune/options_text.h"
#include "layers/elementwise.h"
#include "model/weight_source.h"

namespace rowshard {

namespace {

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

AdapterConfig adapter_of(const LoraOptions& lora) {
  AdapterConfig config;
  config.r = static_cast<int>(lora.r);
  config.alpha = lora.alpha;
  config.target_modules = lora.target_modules;
  return config;
}

int64_t whole_cols(const WeightSpec& weight) {
  return weight.slice.is_whole() ? weight.shape[1] : weight.slice.cols;
}

SyntheticOptions sized(SyntheticOptions options) {
  options.model.max_position_embeddings = options.tokens;
  return options;
}

}  // namespace

std::string to_text(const SyntheticOptions& o) {
  const ModelConfig& m = o.model;
  return message("hidden ", m.hidden_size, " ffn ", m.intermediate_size, " layers ", m.layers,
                 " heads ", m.heads, " ", m.kv_heads, " ", m.head_dim, " vocabulary ", m.vocab_size,
                 " tied ", m.tie_word_embeddings, " ", to_text(o.execution), " r ", o.lora.r,
                 " recompute ", to_string(o.recompute), " tokens ", o.tokens, " accum ",
                 o.grad_accum, " cuda_graph ", o.cuda_graph);
}

FinetuneOptions plan_options(const SyntheticOptions& options) {
  FinetuneOptions plan;
  plan.execution = options.execution;
  plan.lora = options.lora;
  plan.recompute = options.recompute;
  plan.seq_len = options.tokens;
  plan.grad_accum = options.grad_accum;
  plan.cuda_graph = options.cuda_graph;
  return plan;
}

SyntheticRun::SyntheticRun(World& world, const SyntheticOptions& options)
    : options_(sized(options)),
      job_(world, options_.model, options.execution, options.recompute, to_text(options)),
      adapters_(options_.model, adapter_of(options.lora), job_.data_size(),
                job_.model().options().activations, 1, job_.context(), job_.model().slice()),
      optimizer_(adapters_, job_.reduce_group(), 0, 1, job_.context(),
                 job_.tensor_parallel_groups()) {
  Context& ctx = job_.context();
  RandomSource source;
  job_.load(source);
  job_.model().set_source([] { return std::make_unique<RandomSource>(); });
  // B is not zero: a product with zeros is faster, and A's gradient would be nothing.
  std::vector<float> full(adapters_.trainable());
  for (int64_t i = 0; i < adapters_.trainable(); ++i)
    full[i] = static_cast<float>(static_cast<int64_t>(mix(i + 1) >> 40) - (1 << 23)) * 0x1p-30f;
  const std::vector<float> values = adapters_.cut(full);
  copy(adapters_.parameters(),
       ConstView(values.data(), DType::kF32, adapters_.parameters().shape, kHost), ctx.stream);
  ctx.stream.synchronize();
  adapters_.refresh_compute(ctx.stream);
  loss_sum_ = ctx.arena.tensor(Category::kOptimizer, "loss_sum", DType::kF64, {1});
  const auto vocabulary = static_cast<uint64_t>(options.model.vocab_size);
  for (int64_t k = 0; k < options.grad_accum; ++k) {
    const int64_t number = k * job_.data_size() + job_.data_rank();
    MicroBatch host;
    for (int64_t i = 0; i < options.tokens; ++i) {
      host.input_ids.push_back(static_cast<int32_t>(mix(i * 8191 + number) % vocabulary));
      host.labels.push_back(static_cast<int32_t>(mix(i * 131071 + number + 7) % vocabulary));
    }
    host.cu_seqlens = {0, static_cast<int32_t>(options.tokens)};
    host.valid_tokens = host.head_tokens = options.tokens;
    batches_.push_back(std::make_unique<DeviceBatch>(
        job_.model().batch(host.input_ids, host.labels, host.cu_seqlens)));
    hosts_.push_back(std::move(host));
  }
  if (options.cuda_graph)
    graphs_.emplace(job_, adapters_, optimizer_, loss_sum_);
}

SyntheticRun::Step SyntheticRun::step(double lr, Follows follows) {
  Context& ctx = job_.context();
  fill_bytes(adapters_.gradients(), 0, ctx.stream);
  fill_bytes(loss_sum_, 0, ctx.stream);
  const double tokens =
      static_cast<double>(options_.tokens * options_.grad_accum * job_.data_size());
  job_.model().scheduler().reset_exposed();
  if (TensorParallel* tp = job_.tensor_parallel())
    tp->waits.reset();
  ++steps_;
  if (graphs_ && use_graphs_) {
    for (const MicroBatch& batch : hosts_)
      graphs_->train(batch, 1.0 / tokens, Dropout{});
    graphs_->update(lr, steps_);
  } else {
    for (const auto& batch : batches_) {
      job_.model().train(*batch, adapters_, 1.0 / tokens, loss_sum_, Dropout{},
                         batch != batches_.back() ? Follows::kMicroBatch : follows);
    }
    optimizer_.update(lr, steps_);
  }
  Step result;
  result.grad_norm = optimizer_.gradient_norm();
  result.loss = job_.reduce_sum(loss_sum_) / tokens;
  ROWSHARD_CHECK(std::isfinite(result.loss) && std::isfinite(result.grad_norm), Error, "step ",
                 steps_, ": loss ", result.loss, ", gradient norm ", result.grad_norm);
  return result;
}

double SyntheticRun::evaluate() {
  fill_bytes(loss_sum_, 0, job_.context().stream);
  for (const auto& batch : batches_) {
    job_.model().evaluate(*batch, &adapters_, loss_sum_,
                          batch != batches_.back() ? Follows::kMicroBatch : Follows::kNothing);
  }
  return job_.reduce_sum(loss_sum_) /
         static_cast<double>(options_.tokens * options_.grad_accum * job_.data_size());
}

std::vector<float> SyntheticRun::logits() {
  Context& ctx = job_.context();
  const int32_t last = static_cast<int32_t>(options_.tokens - 1);
  const Tensor rows = ctx.arena.tensor(Category::kActivations, "rows", DType::kI32, {1});
  copy(rows, ConstView(&last, DType::kI32, {1}, kHost), ctx.stream);
  ctx.stream.synchronize();
  const Tensor logits = ctx.arena.tensor(Category::kActivations, "logits", DType::kF32,
                                         {1, options_.model.vocab_size});
  job_.model().logits(*batches_[0], &adapters_, rows, logits);
  std::vector<float> values(options_.model.vocab_size);
  copy(View(values.data(), DType::kF32, logits.shape(), kHost), logits, ctx.stream);
  ctx.stream.synchronize();
  return values;
}

void SyntheticRun::interrupted_step() {
  Context& ctx = job_.context();
  const Tensor wrong = ctx.arena.tensor(Category::kActivations, "wrong", DType::kF32, Shape{2});
  try {  // the head finds a sum it cannot add to
    job_.model().train(*batches_[0], adapters_, 1.0, wrong, Dropout{});
  } catch (const ShapeError&) {
    return;
  }
  throw LogicError("a sum of the wrong shape was added to");
}

std::vector<float> SyntheticRun::parameters() {
  return job_.full_vector(adapters_, adapters_.parameters());
}

void RandomSource::read(const WeightSpec& weight, int64_t begin, int64_t end, std::byte* to) {
  if (weight.shape.rank() == 1) {  // norms: ones
    const float one = 1.0f;
    const bf16 half(one);
    const auto* bytes = weight.dtype == DType::kF32 ? reinterpret_cast<const std::byte*>(&one)
                                                    : reinterpret_cast<const std::byte*>(&half);
    for (int64_t i = begin; i < end; ++i)
      to[i - begin] = bytes[i % size_of(weight.dtype)];
    return;
  }
  if (is_mx(weight.storage)) {  // both copies hold the same values
    const bool columnwise = weight.storage == Storage::kMxColumnwise;
    const int64_t n = weight.shape[columnwise ? 1 : 0], k = weight.shape[columnwise ? 0 : 1];
    const uint64_t seed = std::hash<std::string>{}(weight.name);
    const float scale = 1.7f / std::sqrt(static_cast<float>(k)) * 0x1p-23f;
    std::vector<float> values(n * k);
    for (int64_t i = 0; i < n * k; ++i)
      values[i] = scale * static_cast<float>(static_cast<int64_t>(mix(seed + i) >> 40) - (1 << 23));
    const std::vector<std::byte> bytes = quantize_mx(weight, values);
    std::copy(bytes.begin() + begin, bytes.begin() + end, to);
    return;
  }
  // e4m3: below 2, so no NaN. bf16: 2^-8 to 2^-6, of either sign. A slice has the bytes of the
  // whole.
  const bool fp8 = weight.dtype == DType::kE4M3;
  const uint64_t keep = fp8 ? 0xBFBFBFBFBFBFBFBFull : 0x80FF80FF80FF80FFull;
  const uint64_t set = fp8 ? 0 : 0x3C003C003C003C00ull;
  const uint64_t seed = std::hash<std::string>{}(weight.name);
  const auto fill = [&](int64_t from, int64_t until, std::byte* out) {  // bytes of the whole
    for (int64_t word = from / 8; word * 8 < until; ++word) {
      const uint64_t bits = (mix(seed + static_cast<uint64_t>(word)) & keep) | set;
      const auto* bytes = reinterpret_cast<const std::byte*>(&bits);
      const int64_t first = std::max(from, word * 8), last = std::min(until, word * 8 + 8);
      std::memcpy(out + (first - from), bytes + (first - word * 8), last - first);
    }
  };
  const int64_t row_bytes = weight.shape[1] * size_of(weight.dtype);
  const int64_t whole_row = whole_cols(weight) * size_of(weight.dtype);
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / row_bytes, until = std::min(end, (row + 1) * row_bytes);
    const int64_t first = (weight.slice.row + row) * whole_row +
                          weight.slice.col * size_of(weight.dtype) + (at - row * row_bytes);
    fill(first, first + (until - at), to + (at - begin));
    at = until;
  }
}

void RandomSource::scales(const WeightSpec& weight, float* to) {
  const int64_t rows = ceil_div(weight.shape[0], 128), cols = ceil_div(weight.shape[1], 128);
  const int64_t stride = ceil_div(whole_cols(weight), 128);
  const float typical = 1.6f / std::sqrt(static_cast<float>(whole_cols(weight)));
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t block =
        (weight.slice.row / 128 + i / cols) * stride + weight.slice.col / 128 + i % cols;
    to[i] = typical * (0.5f + static_cast<float>(block % 11) / 10.0f);
  }
}

}  // namespace rowshard
