#include "core/graph.h"

#include <utility>

#if ROWSHARD_CUDA
#include "core/cuda_check.h"
#endif

namespace rowshard {

Graph::~Graph() {
  reset();
}

Graph::Graph(Graph&& other) noexcept
    : executable_(std::exchange(other.executable_, nullptr)),
      nodes_(std::exchange(other.nodes_, 0)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(executable_, other.executable_);
  std::swap(nodes_, other.nodes_);
  return *this;
}

#if ROWSHARD_CUDA

void Graph::reset() {
  if (executable_)
    cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
  executable_ = nullptr;
  nodes_ = 0;
}

void Graph::capture(Stream& stream, const std::function<void()>& work) {
  ROWSHARD_CHECK(stream.device().is_cuda(), DeviceError, "stream ", stream.name(), " is on ",
                 stream.device(), ": only work on cuda can be recorded as a graph");
  reset();
  // Relaxed: an arena may still take memory, which is not part of the recording and stays its own.
  CUDA_CHECK(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeRelaxed));
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(native(stream), &graph);
    if (graph)
      cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  CUDA_CHECK(cudaStreamEndCapture(native(stream), &graph));
  cudaGraphExec_t executable = nullptr;
  size_t nodes = 0;
  cudaError_t status = cudaGraphGetNodes(graph, nullptr, &nodes);
  if (status == cudaSuccess)
    status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  CUDA_CHECK(status);
  executable_ = executable;
  nodes_ = static_cast<int64_t>(nodes);
}

void Graph::replay(Stream& stream) {
  ROWSHARD_CHECK(executable_, LogicError, "graph: a replay before a capture");
  CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), native(stream)));
}

#else

void Graph::reset() {}
void Graph::capture(Stream& stream, const std::function<void()>&) {
  require_host(stream.device());
  throw DeviceError("stream " + stream.name() +
                    " is on the host: only work on cuda can be recorded as a graph");
}
void Graph::replay(Stream&) {
  throw LogicError("graph: a replay before a capture");
}

#endif

}  // namespace rowshard
