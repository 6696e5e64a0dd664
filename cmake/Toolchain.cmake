# Language levels, warnings as errors, and whether the cuda device is built.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# Asserts of ours are exceptions, not assert(): Release keeps every check.
set(CMAKE_CXX_FLAGS_RELEASE "-O3")

set(ROWSHARD_HAVE_CUDA OFF)
if(NOT ROWSHARD_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # wgmma, TMA and setmaxnreg exist for sm_90a only.
    set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "CUDA architectures")
    enable_language(CUDA)
    # CMake 3.25 does not know nvcc 13's dialects.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA_COMPILE_FEATURES cuda_std_20 ${CMAKE_CUDA_COMPILE_FEATURES})
    endif()
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
      set(ROWSHARD_HAVE_CUDA ON)
    else()
      message(STATUS "rowshard: nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.9 (block-scaled GEMM)")
    endif()
  endif()
  if(ROWSHARD_CUDA STREQUAL "ON" AND NOT ROWSHARD_HAVE_CUDA)
    message(FATAL_ERROR "ROWSHARD_CUDA=ON but no nvcc >= 12.9 was found; set CUDACXX or put nvcc on PATH")
  endif()
endif()
message(STATUS "rowshard: cuda device ${ROWSHARD_HAVE_CUDA}")

# Without contraction the host oracle rounds the same way on every compiler; fused operations are
# written as std::fma where they are meant.
add_compile_options(
  $<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
  $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings> $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>
  # std::bit_cast, std::array and std::min are constexpr and meant for kernels too.
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
if(ROWSHARD_HOST_ARCH AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-march=${ROWSHARD_HOST_ARCH}>)
endif()
