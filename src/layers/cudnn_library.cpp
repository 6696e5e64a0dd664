#include "layers/cudnn_library.h"

#ifndef ROWSHARD_CUDNN
#define ROWSHARD_CUDNN 0
#endif

#if ROWSHARD_CUDNN

#include <cudnn.h>
#include <dlfcn.h>

#include "core/error.h"

namespace rowshard::cuda {
namespace {

constexpr const char* kLibrary = "libcudnn.so.9";
constexpr size_t kOldestVersion = 90600;  // grouped heads over packed segments

void* library() {
  static void* const handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  return handle;
}

template <typename F>
F* function(const char* name) {
  return reinterpret_cast<F*>(dlsym(library(), name));
}

std::string find_reason() {
  if (!library())
    return message(kLibrary, " cannot be opened: ", dlerror());
  for (const char* name :
       {"cudnnGetVersion", "cudnnGetErrorString", "cudnnGetLastErrorString", "cudnnCreate",
        "cudnnSetStream", "cudnnGetStream", "cudnnBackendCreateDescriptor",
        "cudnnBackendDestroyDescriptor", "cudnnBackendSetAttribute", "cudnnBackendGetAttribute",
        "cudnnBackendFinalize", "cudnnBackendExecute"}) {
    if (!dlsym(library(), name))
      return message(kLibrary, " has no ", name);
  }
  const size_t version = cudnnGetVersion();
  if (version < kOldestVersion)
    return message("cuDNN ", version, " is older than ", kOldestVersion);
  return "";
}

}  // namespace

const std::string& cudnn_unavailable_reason() {
  static const std::string reason = find_reason();
  return reason;
}

}  // namespace rowshard::cuda

#define ROWSHARD_FORWARD(name, ...)                                               \
  static auto* const forward = rowshard::cuda::function<decltype(::name)>(#name); \
  return forward(__VA_ARGS__)

// Prototypes are cudnn.h's.
size_t CUDNNWINAPI cudnnGetVersion() {
  ROWSHARD_FORWARD(cudnnGetVersion);
}
const char* CUDNNWINAPI cudnnGetErrorString(cudnnStatus_t status) {
  ROWSHARD_FORWARD(cudnnGetErrorString, status);
}
void CUDNNWINAPI cudnnGetLastErrorString(char* text, size_t size) {
  ROWSHARD_FORWARD(cudnnGetLastErrorString, text, size);
}
cudnnStatus_t CUDNNWINAPI cudnnCreate(cudnnHandle_t* handle) {
  ROWSHARD_FORWARD(cudnnCreate, handle);
}
cudnnStatus_t CUDNNWINAPI cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  ROWSHARD_FORWARD(cudnnSetStream, handle, stream);
}
cudnnStatus_t CUDNNWINAPI cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  ROWSHARD_FORWARD(cudnnGetStream, handle, stream);
}
cudnnStatus_t CUDNNWINAPI cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                       cudnnBackendDescriptor_t* descriptor) {
  ROWSHARD_FORWARD(cudnnBackendCreateDescriptor, type, descriptor);
}
cudnnStatus_t CUDNNWINAPI cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  ROWSHARD_FORWARD(cudnnBackendDestroyDescriptor, descriptor);
}
cudnnStatus_t CUDNNWINAPI cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                                   cudnnBackendAttributeName_t name,
                                                   cudnnBackendAttributeType_t type, int64_t count,
                                                   const void* elements) {
  ROWSHARD_FORWARD(cudnnBackendSetAttribute, descriptor, name, type, count, elements);
}
cudnnStatus_t CUDNNWINAPI cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                                   cudnnBackendAttributeName_t name,
                                                   cudnnBackendAttributeType_t type,
                                                   int64_t requested, int64_t* count,
                                                   void* elements) {
  ROWSHARD_FORWARD(cudnnBackendGetAttribute, descriptor, name, type, requested, count, elements);
}
cudnnStatus_t CUDNNWINAPI cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  ROWSHARD_FORWARD(cudnnBackendFinalize, descriptor);
}
cudnnStatus_t CUDNNWINAPI cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                              cudnnBackendDescriptor_t variant) {
  ROWSHARD_FORWARD(cudnnBackendExecute, handle, plan, variant);
}

#else

namespace rowshard::cuda {

const std::string& cudnn_unavailable_reason() {
  static const std::string reason = "this build has no cudnn-frontend";
  return reason;
}

}  // namespace rowshard::cuda

#endif
