// The CUDA kernels' entry points, without CUDA: enqueues the work of a plan on a stream.
#pragma once

#include <cstddef>
#include <stdexcept>

#include "bnexport.h"
#include "launch_plan.h"

namespace bnexport::cuda {

// A call of the CUDA runtime failed.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The library has no code for a device.
class NoKernels : public CudaError {
 public:
  using CudaError::CudaError;
};

constexpr int kMostDevices = 64;

// The CUDA version of the runtime inside, as 1000 * major + 10 * minor.
int runtime_version();
int device_count();
// Throws CudaError when the kernels cannot run on the device; asked once for each.
void check_device(int device);
// Returns the device that was current before; -1 where that one has no context.
int set_device(int device);
// Of the current device; asked once for each.
int64_t multiprocessors();

struct Workplace {
  void* stream;  // cudaStream_t
  void* workspace;
};

// Everything, or with `row` this process's 2 C + 1 doubles.
void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row = nullptr);
void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row = nullptr);

void wait(void* stream);
// Between host and device; returns when the host's memory may be used.
void copy_and_wait(void* to, const void* from, size_t bytes, bool to_host, void* stream);

}  // namespace bnexport::cuda
