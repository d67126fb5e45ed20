# libbnexport_ops_cuda.so: the CUDA kernels with their C API, beside the operators' library.
#
# It is left out where there is no nvcc, and by the development set-up (make setup passes
# BNEXPORT_CUDA=OFF), for it takes minutes to compile; `make cuda` builds it alone.

string(TOUPPER "${BNEXPORT_CUDA}" cuda_wanted)
if(cuda_wanted STREQUAL "OFF")
  message(STATUS "CUDA library: left out (BNEXPORT_CUDA=OFF); `make cuda` builds it")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(cuda_wanted STREQUAL "AUTO")
    message(STATUS "CUDA library: left out, no nvcc was found; operators on GPUs need one built with it")
    return()
  endif()
  message(FATAL_ERROR "BNEXPORT_CUDA=ON: nvcc was not found; put it on PATH or set CUDACXX, or leave the CUDA library out "
    "with -DBNEXPORT_CUDA=OFF")
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # given below, as 90a and PTX need it
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

set(cuda_targets)
foreach(architecture IN LISTS BNEXPORT_CUDA_ARCHITECTURES)
  list(APPEND cuda_targets "SHELL:-gencode=arch=compute_${architecture},code=sm_${architecture}")
  set(newest ${architecture})
endforeach()
if(NOT newest MATCHES "a$")  # code for an architecture with an a runs on no other
  list(APPEND cuda_targets "SHELL:-gencode=arch=compute_${newest},code=compute_${newest}")
endif()
message(STATUS "CUDA library: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${BNEXPORT_CUDA_ARCHITECTURES}")

add_library(bnexport_ops_cuda MODULE
  custom_ops/kernels/cuda/kernels.cu
  custom_ops/kernels/cuda/launch_plan.cpp
  custom_ops/comm/nccl.cpp
  custom_ops/capi/nccl_capi.cpp
  custom_ops/capi/cuda_capi.cpp)
target_include_directories(bnexport_ops_cuda PRIVATE custom_ops/include ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(bnexport_ops_cuda PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
target_compile_options(bnexport_ops_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-O3 -Wall -Wextra>
  $<$<COMPILE_LANGUAGE:CUDA>:-O3 -Xcompiler=-Wall,-Wextra --threads=0 -Xfatbin=-compress-all>)
target_compile_options(bnexport_ops_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_targets}>")
if(SKBUILD_PROJECT_VERSION)
  target_compile_definitions(bnexport_ops_cuda PRIVATE BNEXPORT_VERSION="${SKBUILD_PROJECT_VERSION}")
endif()
set_target_properties(bnexport_ops_cuda PROPERTIES
  CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
# The runtime inside is the driver's partner for good: it must not be unloaded with a session.
target_link_options(bnexport_ops_cuda PRIVATE -Wl,-z,nodelete -Wl,--no-undefined
  -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/custom_ops/exports_cuda.map
  -static-libstdc++ -static-libgcc -Wl,--gc-sections -Wl,-s)
install(TARGETS bnexport_ops_cuda LIBRARY DESTINATION bnexport/lib)
