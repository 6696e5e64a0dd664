// libcudnn is opened at the first use, so that the program starts where it is not installed. The
// twelve functions that cudnn-frontend calls are defined here and forward to it.
#pragma once

#include <string>

namespace rowshard::cuda {

/// Empty when libcudnn is there and new enough, else why not. Asked once, then remembered.
const std::string& cudnn_unavailable_reason();

}  // namespace rowshard::cuda
