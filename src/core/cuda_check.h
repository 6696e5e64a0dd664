// CUDA and cuBLAS return codes become DeviceError. Only for .cu files and cuda-only .cpp files.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include "core/device.h"

namespace rowshard {

inline void cuda_check(cudaError_t status, const char* what, const char* file, int line) {
  if (status == cudaSuccess)
    return;
  cudaGetLastError();  // clear the non-sticky state so that the next call reports its own error
  throw DeviceError(message(what, " failed: ", cudaGetErrorName(status), " (",
                            cudaGetErrorString(status), ") at ", file, ":", line));
}

inline void cublas_check(cublasStatus_t status, const char* what, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS)
    return;
  throw DeviceError(
      message(what, " failed: ", cublasLtGetStatusName(status), " at ", file, ":", line));
}

inline cudaStream_t native(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.native());
}

}  // namespace rowshard

#define CUDA_CHECK(call) ::rowshard::cuda_check((call), #call, __FILE__, __LINE__)
#define CUBLAS_CHECK(call) ::rowshard::cublas_check((call), #call, __FILE__, __LINE__)
/// After a kernel launch: reports a bad launch configuration with the launcher's name.
#define CUDA_CHECK_LAUNCH(name) \
  ::rowshard::cuda_check(cudaGetLastError(), "launch of " name, __FILE__, __LINE__)
