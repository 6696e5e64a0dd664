// Descriptions of matrices for TMA (CUtensorMap): what a kernel's boxes are cut from. For .cu
// files.
#pragma once

#include <cudaTypedefs.h>

#include "core/cuda_check.h"

namespace rowshard::cuda {

/// The driver's encoder, found at run time so that nothing links against the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found));
    ROWSHARD_CHECK(found == cudaDriverEntryPointSuccess && function, DeviceError,
                   "this driver has no cuTensorMapEncodeTiled; CUDA 12 or newer is needed");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encode;
}

/// A matrix [rows, cols], `cols` contiguous, read or written in boxes [box_rows, box_cols] with the
/// 128B swizzle: a row of a box is 128 bytes. `data` is 16-byte aligned and so is every row.
inline CUtensorMap tensor_map(CUtensorMapDataType type, int element_bytes, const void* data,
                              int64_t rows, int64_t cols, int box_rows, int box_cols) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(cols * element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult status =
      tensor_map_encoder()(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  ROWSHARD_CHECK(status == CUDA_SUCCESS, DeviceError, "cuTensorMapEncodeTiled failed with ",
                 static_cast<int>(status), " for [", rows, ", ", cols, "] of ", element_bytes,
                 " bytes at ", data, ", box [", box_rows, ", ", box_cols, "]");
  return map;
}

inline CUtensorMap codes_map(const void* codes, int64_t rows, int64_t cols, int box_rows) {
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, codes, rows, cols, box_rows, 128);
}
inline CUtensorMap bf16_map(const void* data, int64_t rows, int64_t cols) {
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, rows, cols, 64, 64);
}

}  // namespace rowshard::cuda
