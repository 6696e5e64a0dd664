// A training step as recorded CUDA graphs: one for the forward and backward of each shape of
// micro-batch, one for the optimiser's part. What a replay computes has the bits of the same work
// queued by the host.
//
// A shape is recorded when it comes for the second time: the first time the work is queued as
// usual, which makes whatever is made lazily and every choice of the host for this shape (library
// plans, columnwise copies that stay). A shape is what the host looks at: the numbers of tokens and
// of labels, and attention_layout. What else changes from step to step is read on the device:
// tokens, segments, the loss scale, the dropout stream, AdamW's constants.
//
// At most kMostShapes shapes are recorded; further ones are queued as usual. Each recording is
// logged, the limit too. Weights that were loaded, dropped or planned anew (DecoderModel::changes)
// drop every recording. Activations of recordings lie in blocks of their own (ArenaRecording),
// shared by all of them.
//
// One rank, on cuda: ConfigError otherwise.
#pragma once

#include <map>
#include <memory>

#include "core/graph.h"
#include "finetune/adapter_optimizer.h"
#include "finetune/batches.h"
#include "finetune/job.h"

namespace rowshard {

class StepGraphs {
 public:
  static constexpr int64_t kMostShapes = 32;

  /// Everything outlives this. `loss_sum` as for DecoderModel::train.
  StepGraphs(Job& job, AdapterSet& adapters, AdapterOptimizer& optimizer, const View& loss_sum);

  /// DecoderModel::train of this micro-batch.
  void train(const MicroBatch& batch, double scale, const Dropout& dropout);
  /// AdapterOptimizer::update.
  void update(double lr, int64_t step);

  int64_t recorded() const { return recorded_; }  // shapes, since the last change of the model
  int64_t replayed() const { return replayed_; }  // micro-batches, ever

 private:
  struct Numbers {  // as they lie on the device
    double scale;
    uint64_t dropout_stream;
  };
  struct Recording {
    std::unique_ptr<DeviceBatch> batch;
    Graph graph;
  };
  using Shape = std::vector<int64_t>;

  Shape shape_of(const MicroBatch& batch) const;
  void queue(const DeviceBatch& batch, Dropout dropout);
  void record(Recording& recording, const MicroBatch& batch, const Dropout& dropout);
  void capture(Graph& graph, const std::function<void()>& work);

  Job& job_;
  AdapterSet& adapters_;
  AdapterOptimizer& optimizer_;
  View loss_sum_;
  Tensor numbers_;
  std::map<Shape, Recording> shapes_;  // seen; recorded where the graph says so
  Graph update_;
  bool updated_ = false;
  int64_t changes_ = 0, recorded_ = 0, replayed_ = 0;
};

}  // namespace rowshard
