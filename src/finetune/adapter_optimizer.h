// One optimiser step of the adapters over the data-parallel ranks.
//
// Parameters are replicated, the moments are cut: a step reduce-scatters the flat gradient, clips
// by the norm over all parts, updates this rank's part of the parameters and gathers the parts. A
// rank holds 1/ranks of the moments and of the reduced gradient. Nothing makes the host wait.
#pragma once

#include "comm/communicator.h"
#include "finetune/adamw.h"
#include "model/adapter_set.h"

namespace rowshard {

/// The tensor-parallel ranks that hold this micro-batch with this one. Gradients of factors that
/// several of them hold are added up over those, exactly once; the norm counts every factor once.
struct TensorParallelGroups {
  Communicator* tp = nullptr;  // null: one rank
  Communicator* kv = nullptr;  // those with the same KV heads; null: nobody else
  bool sequence = false;       // replicated factors have gradients of this rank's tokens only
};

class AdapterOptimizer {
 public:
  /// `adapters` and `group` (the ranks that see different data) outlive this.
  AdapterOptimizer(AdapterSet& adapters, Communicator& group, double weight_decay, double clip_norm,
                   Context& ctx, const TensorParallelGroups& tensor_parallel = {});

  /// Step `step` (from 1) with the gradients in the adapters, which it leaves summed nowhere: zero
  /// them before the next. A gradient that is not finite changes nothing.
  void update(double lr, int64_t step) {
    prepare(lr, step);
    queue();
  }
  /// The two halves: what differs from step to step goes to the device; then everything else is
  /// queued, which may be recorded (core/graph.h) with one rank.
  void prepare(double lr, int64_t step);
  void queue();
  /// Seconds the last step's collectives took on the stream; 0 with one rank. Waits for the stream.
  double reduction_seconds() const;
  /// Global norm of the last step's gradient before clipping; waits for the stream.
  double gradient_norm() const;

  /// [count / ranks] f32; for checkpoints.
  const View& m() const { return m_.view(); }
  const View& v() const { return v_.view(); }
  /// This rank's slice of a vector of adapters().count() elements.
  View part(const View& flat) const;
  ConstView part(const ConstView& flat) const;

 private:
  /// The part of the reduced gradient that lies in [begin, end) of the flat vector.
  View reduced(int64_t begin, int64_t end) const;
  void sum_over_tensor_parallel();
  void squares_of_own_part();

  AdapterSet& adapters_;
  Communicator& group_;
  TensorParallelGroups tensor_parallel_;
  Context& ctx_;
  AdamW hyper_;
  double clip_norm_;
  Tensor m_, v_;
  Tensor gradient_part_;                              // [count / ranks] f32, reduced
  Tensor squares_;                                    // [1] f64
  Tensor clip_;                                       // [2] f32: the factor, the norm
  Tensor constants_;                                  // AdamWConstants of the step, as bytes
  std::vector<std::pair<Event, Event>> collectives_;  // begin and end of each, of the last step
};

}  // namespace rowshard
