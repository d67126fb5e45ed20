// The CUDA kernels' entry points, without CUDA: enqueues the work of a plan on a stream.
#ifndef BNEXPORT_KERNELS_CUDA_KERNELS_H
#define BNEXPORT_KERNELS_CUDA_KERNELS_H

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

int device_count();
// Of the current device; asked once for each.
const DeviceProperties& device_properties();

struct Workplace {
  void* stream;  // cudaStream_t
  void* workspace;
};

// row: this process's 2 C + 1 doubles.
void moments(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row);
void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where);
void backward_moments(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row);
void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where);

// `count` > 0 numbers between float32 and float64.
void convert(const void* from, int32_t from_dtype, void* to, int32_t to_dtype, int64_t count, void* stream);
// Between host and device; returns when the host's memory may be used.
void copy_and_wait(void* to, const void* from, size_t bytes, bool to_host, void* stream);

}  // namespace bnexport::cuda

#endif  // BNEXPORT_KERNELS_CUDA_KERNELS_H
