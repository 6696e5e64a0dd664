// A recorded stretch of a cuda stream's work, replayed without its host code.
//
// The recording holds addresses. So what a capture allocates must come from an Arena that serves
// this graph alone (or graphs that are only replayed one after another on one stream) and outlives
// it, or from a shared one under an ArenaRecording: other blocks of a shared arena would be handed
// on between replays. Run the same work once before the capture: caches are filled, and decisions
// that belong to the host are made. Numbers that change between replays are read where they lie
// (core/argument.h).
//
// Host streams have no graphs: work there is done when it is issued.
#pragma once

#include <cstdint>
#include <functional>

#include "core/device.h"

namespace rowshard {

class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  /// Records what `work` queues on `stream`, in place of what was recorded before; nothing of it
  /// runs. What `work` throws passes through, and the stream is no longer recording. DeviceError on
  /// the host, or when something in it cannot be recorded.
  void capture(Stream& stream, const std::function<void()>& work);
  /// Queues the recorded work on `stream`. LogicError before a capture.
  void replay(Stream& stream);
  bool recorded() const { return executable_ != nullptr; }
  int64_t nodes() const { return nodes_; }  // kernels, copies and fills of a replay

 private:
  void reset();
  void* executable_ = nullptr;  // cudaGraphExec_t
  int64_t nodes_ = 0;
};

}  // namespace rowshard
