# Everything from the distribution's packages; launch/setup installs what is missing.
find_package(MPI REQUIRED COMPONENTS CXX)
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
# Boost is linked statically so that a binary built here runs where Boost is not installed.
set(Boost_USE_STATIC_LIBS ON)
find_package(Boost REQUIRED COMPONENTS program_options)
find_package(nlohmann_json REQUIRED)
find_path(OPENBLAS_INCLUDE_DIR cblas.h REQUIRED
          PATH_SUFFIXES openblas ${CMAKE_LIBRARY_ARCHITECTURE} ${CMAKE_LIBRARY_ARCHITECTURE}/openblas)
find_library(OPENBLAS_LIBRARY openblas REQUIRED)

add_library(rowshard_third_party INTERFACE)
target_include_directories(rowshard_third_party SYSTEM INTERFACE ${OPENBLAS_INCLUDE_DIR})
target_link_libraries(rowshard_third_party INTERFACE ${OPENBLAS_LIBRARY} OpenMP::OpenMP_CXX
                      Threads::Threads nlohmann_json::nlohmann_json)
if(ROWSHARD_HAVE_CUDA)
  find_package(CUDAToolkit 12.9 REQUIRED)
  find_package(NCCL REQUIRED)
  target_compile_definitions(rowshard_third_party INTERFACE ROWSHARD_CUDA=1)
  target_link_libraries(rowshard_third_party INTERFACE CUDA::cudart_static CUDA::cublasLt)
  include(FindCudnnFrontend)
else()
  target_compile_definitions(rowshard_third_party INTERFACE ROWSHARD_CUDA=0)
endif()
