// Work on a cuda stream as something the watchdog can poll. Only for cuda builds.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "comm/watchdog.h"
#include "core/device.h"

namespace rowshard {

/// Watched from construction, so that an issuing call that blocks is seen too; `issued` says that
/// the work is on the stream. While the stream is capturing nothing runs, so nothing is watched.
class CudaWatch {
 public:
  CudaWatch(Watchdog& watchdog, Stream& stream, std::string what);
  ~CudaWatch();
  CudaWatch(const CudaWatch&) = delete;
  CudaWatch& operator=(const CudaWatch&) = delete;
  void issued();

 private:
  struct State;
  std::shared_ptr<State> state_;
  Stream& stream_;
};

}  // namespace rowshard
