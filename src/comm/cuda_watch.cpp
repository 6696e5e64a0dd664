#include "comm/cuda_watch.h"

#if ROWSHARD_CUDA

#include <mutex>
#include <vector>

#include "core/cuda_check.h"

namespace rowshard {
namespace {

/// Events are made once and used again: one is needed for every collective in flight.
class EventPool {
 public:
  cudaEvent_t take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) {
      cudaEvent_t event = nullptr;
      CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      return event;
    }
    cudaEvent_t event = free_.back();
    free_.pop_back();
    return event;
  }
  void give(cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

EventPool& event_pool() {
  // Never destroyed: the driver may be gone before static destructors run.
  static EventPool& pool = *new EventPool;
  return pool;
}

}  // namespace

struct CudaWatch::State {
  enum Stage { kIssuing, kIssued, kOver };
  std::string what;
  std::atomic<Stage> stage{kIssuing};
  cudaEvent_t event = event_pool().take();

  ~State() { event_pool().give(event); }

  bool done() const {
    if (stage != kIssued)
      return stage == kOver;
    // Relaxed: a query from here must not invalidate a capture of another thread.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t status = cudaEventQuery(event);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status == cudaErrorNotReady)
      return false;
    CUDA_CHECK(status);
    return true;
  }
};

CudaWatch::CudaWatch(Watchdog& watchdog, Stream& stream, std::string what) : stream_(stream) {
  if (stream.capturing())
    return;
  state_ = std::make_shared<State>();
  state_->what = std::move(what);
  watchdog.watch([state = state_] { return state->what; },
                 [state = state_] { return state->done(); });
}

CudaWatch::~CudaWatch() {
  if (state_ && state_->stage == State::kIssuing)
    state_->stage = State::kOver;  // it threw
}

void CudaWatch::issued() {
  if (!state_)
    return;
  CUDA_CHECK(cudaEventRecord(state_->event, native(stream_)));
  state_->stage = State::kIssued;
}

}  // namespace rowshard

#endif
