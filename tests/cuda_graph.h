// A piece of queued work as a CUDA graph, for tests of both devices: on the host, which has no
// graphs, replaying runs the work again.
#pragma once

#include <functional>
#include <utility>

#include "test_device.h"

#if ROWSHARD_CUDA
#include "core/cuda_check.h"
#endif

namespace rowshard::testing {

class Graph {
 public:
  /// Runs the work once eagerly, so that the arena has its blocks and libraries their kernels, then
  /// records it. The arena must not poison: its fill waits on the host.
  Graph(Context& ctx, std::function<void()> work) : stream_(ctx.stream), work_(std::move(work)) {
    ctx.arena.set_poison(false);
    work_();
    stream_.synchronize();
#if ROWSHARD_CUDA
    if (stream_.device().is_cuda()) {
      CUDA_CHECK(cudaStreamBeginCapture(native(stream_), cudaStreamCaptureModeThreadLocal));
      work_();
      cudaGraph_t graph = nullptr;
      CUDA_CHECK(cudaStreamEndCapture(native(stream_), &graph));
      CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
      CUDA_CHECK(cudaGraphDestroy(graph));
    }
#endif
  }
  ~Graph() {
#if ROWSHARD_CUDA
    if (executable_)
      cudaGraphExecDestroy(executable_);
#endif
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay() {
#if ROWSHARD_CUDA
    if (executable_) {
      CUDA_CHECK(cudaGraphLaunch(executable_, native(stream_)));
      stream_.synchronize();
      return;
    }
#endif
    work_();
  }

 private:
  Stream& stream_;
  std::function<void()> work_;
#if ROWSHARD_CUDA
  cudaGraphExec_t executable_ = nullptr;
#endif
};

}  // namespace rowshard::testing
