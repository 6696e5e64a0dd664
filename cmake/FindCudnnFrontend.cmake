# rowshard_cudnn: cuDNN's headers and the header-only cudnn-frontend, for attention on cuda. Found in
# CUDNN_FRONTEND_ROOT, where launch/setup puts it, or on the compiler's paths; without it the build
# has our own attention kernels only. libcudnn is opened at run time and never linked.
set(ROWSHARD_CUDNN AUTO CACHE STRING "Attention through cuDNN: AUTO (if the headers are found), ON or OFF")
set(CUDNN_FRONTEND_VERSION 1.15.0)  # as in launch/cudnn_frontend.txt
add_library(rowshard_cudnn INTERFACE)
set(ROWSHARD_HAVE_CUDNN OFF)
if(NOT ROWSHARD_CUDNN STREQUAL "OFF")
  set(_cache "$ENV{XDG_CACHE_HOME}")
  if(NOT _cache)
    set(_cache "$ENV{HOME}/.cache")
  endif()
  find_path(CUDNN_INCLUDE_DIR cudnn_graph.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h
            HINTS ${CUDNN_FRONTEND_ROOT}/include $ENV{CUDNN_FRONTEND_ROOT}/include
                  ${_cache}/rowshard/cudnn-frontend-${CUDNN_FRONTEND_VERSION}/include)
  if(CUDNN_INCLUDE_DIR AND CUDNN_FRONTEND_INCLUDE_DIR)
    set(ROWSHARD_HAVE_CUDNN ON)
    target_include_directories(rowshard_cudnn SYSTEM INTERFACE ${CUDNN_FRONTEND_INCLUDE_DIR}
                                                               ${CUDNN_INCLUDE_DIR})
    target_compile_definitions(rowshard_cudnn INTERFACE ROWSHARD_CUDNN=1)
    target_link_libraries(rowshard_cudnn INTERFACE ${CMAKE_DL_LIBS})
  elseif(ROWSHARD_CUDNN STREQUAL "ON")
    message(FATAL_ERROR "ROWSHARD_CUDNN=ON: cuDNN headers '${CUDNN_INCLUDE_DIR}', cudnn-frontend "
                        "'${CUDNN_FRONTEND_INCLUDE_DIR}'; launch/setup gets the latter")
  endif()
endif()
message(STATUS "rowshard: cuDNN attention ${ROWSHARD_HAVE_CUDNN}")
