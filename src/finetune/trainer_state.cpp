// Saving and resuming a Trainer: the cut optimiser state is put together on rank 0, and cut again
// by whoever reads it.
#include <algorithm>

#include "finetune/run_checkpoint.h"
#include "finetune/trainer.h"

namespace rowshard {

void Trainer::save(const std::filesystem::path& directory) {
  Context& ctx = job_.context();
  // Between steps the gradients are of no use to anybody (the next step zeroes them), so the
  // moments are put together there and saving takes no memory of its own.
  const View whole = adapters_->gradients();
  RunState state;
  const auto download = [&](const ConstView& flat, std::vector<float>& values) {
    values = job_.full_vector(*adapters_, flat);
  };
  download(adapters_->parameters(), state.parameters);
  job_.reduce_group().all_gather(whole, optimizer_->m(), ctx.stream);
  download(whole, state.m);
  job_.reduce_group().all_gather(whole, optimizer_->v(), ctx.stream);
  download(whole, state.v);
  state.step = step_;
  state.position = position_;
  state.seed = options_.seed;
  if (job_.world().rank() == 0)
    write_run_state(directory, state);
  job_.world().barrier();  // nobody goes on before the checkpoint is whole
}

void Trainer::resume(const std::filesystem::path& directory) {
  Context& ctx = job_.context();
  RunState state = read_run_state(directory, adapters_->trainable());
  ROWSHARD_CHECK(state.seed == options_.seed, ConfigError, directory.string(),
                 " was made with --seed ", state.seed, ", this run has ", options_.seed,
                 "; the order of the data depends on it");
  ROWSHARD_CHECK(state.step <= max_steps_, ConfigError, directory.string(), " is at step ",
                 state.step, ", beyond this run's ", max_steps_);
  const int64_t count = adapters_->count();
  const auto upload = [&](const std::vector<float>& full, const View& target, bool cut) {
    const std::vector<float> values = adapters_->cut(full);
    const ConstView whole(values.data(), DType::kF32, {count}, kHost);
    copy(target, cut ? optimizer_->part(whole) : whole, ctx.stream);
    ctx.stream.synchronize();
  };
  upload(state.parameters, adapters_->parameters(), false);
  upload(state.m, optimizer_->m(), true);
  upload(state.v, optimizer_->v(), true);
  adapters_->refresh_compute(ctx.stream);
  step_ = state.step;
  position_ = state.position;
}

}  // namespace rowshard
