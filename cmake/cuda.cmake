# libbnexport_ops_cuda.so: the CUDA kernels with their C API, next to the operators' library.
#
# It takes minutes to compile, so it is left out unless BNEXPORT_CUDA says ON, or AUTO and there is an nvcc.
# `make cuda` builds it alone.

string(TOUPPER "${BNEXPORT_CUDA}" cuda_wanted)
if(cuda_wanted STREQUAL "OFF")
  message(STATUS "CUDA library: left out (BNEXPORT_CUDA=OFF)")
  return()
endif()

# Without the CUDA library everything but GPUs works: only who insists on it has the build fail.
macro(bnexport_without_cuda reason)
  if(NOT cuda_wanted STREQUAL "AUTO")
    message(FATAL_ERROR "BNEXPORT_CUDA=${BNEXPORT_CUDA}: ${reason}; or leave out BNEXPORT_CUDA")
  endif()
  message(STATUS "CUDA library: left out, ${reason}")
  return()
endmacro()

include(cmake/cuda_targets.cmake)
bnexport_nvcc_version(nvcc_version)
if(NOT nvcc_version)
  bnexport_without_cuda("no nvcc was found: for operators on GPUs put it on PATH or set CUDACXX")
endif()
if(nvcc_version VERSION_LESS BNEXPORT_OLDEST_NVCC)
  bnexport_without_cuda("nvcc is ${nvcc_version}: it needs ${BNEXPORT_OLDEST_NVCC} or newer")
endif()
bnexport_cuda_targets(${nvcc_version} "${BNEXPORT_CUDA_ARCHITECTURES}" cuda_architectures dropped)
if(dropped)
  message(STATUS "CUDA library: nvcc ${nvcc_version} does not know ${dropped} of BNEXPORT_CUDA_ARCHITECTURES")
endif()
if(NOT cuda_architectures)
  bnexport_without_cuda("nvcc ${nvcc_version} knows none of BNEXPORT_CUDA_ARCHITECTURES (${BNEXPORT_CUDA_ARCHITECTURES})")
endif()
include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # given below, with PTX of the newest alone
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  bnexport_without_cuda("nvcc ${nvcc_version} cannot compile with this C++ compiler: see CMakeFiles of the build")
endif()
enable_language(CUDA)
find_package(CUDAToolkit)
if(NOT CUDAToolkit_FOUND)
  bnexport_without_cuda("nvcc is there, but not the CUDA toolkit: install its headers and the static runtime")
endif()

set(cuda_targets)
foreach(architecture IN LISTS cuda_architectures)
  list(APPEND cuda_targets "SHELL:-gencode=arch=compute_${architecture},code=sm_${architecture}")
  set(newest ${architecture})
endforeach()
list(APPEND cuda_targets "SHELL:-gencode=arch=compute_${newest},code=compute_${newest}")
message(STATUS "CUDA library: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${cuda_architectures}")

add_library(bnexport_ops_cuda MODULE
  custom_ops/kernels/cuda/kernels.cu
  custom_ops/kernels/cuda/launch_plan.cpp
  custom_ops/capi/cuda_capi.cpp)
target_include_directories(bnexport_ops_cuda PRIVATE custom_ops/kernels/cuda/nvcc ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(bnexport_ops_cuda PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
target_compile_options(bnexport_ops_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:-O3 -Xcompiler=-Wall,-Wextra --threads=0 -Xfatbin=-compress-all>)
target_compile_options(bnexport_ops_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_targets}>")
set_target_properties(bnexport_ops_cuda PROPERTIES
  CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
# The runtime inside is the driver's partner for good: it must not be unloaded with a session.
target_link_options(bnexport_ops_cuda PRIVATE -Wl,-z,nodelete -Wl,--no-undefined
  -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/custom_ops/exports_cuda.map
  -static-libstdc++ -static-libgcc -Wl,--gc-sections -Wl,-s)
bnexport_link_for_old_glibc(bnexport_ops_cuda)
install(TARGETS bnexport_ops_cuda LIBRARY DESTINATION bnexport/lib)
