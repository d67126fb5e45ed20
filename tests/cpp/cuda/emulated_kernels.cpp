// The CUDA library on the emulated device: with cuda_capi.cpp it has the same C API, and host memory is its
// device memory. The loader and the verification of the benchmark are tested with it.
#include <cstring>

#include "../../../custom_ops/kernels/cuda/kernels.h"
#include "../../../custom_ops/kernels/statistics_definitions.h"
#include "emulated_launcher.h"

namespace bnexport::cuda {

int device_count() { return 1; }

// Little of everything, so that small tensors take all the ways.
const DeviceProperties& device_properties() {
  static const DeviceProperties properties{6, 24 << 10, 32 << 10, 1024, 96 << 10, 16};
  return properties;
}

void moments(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  EmulatedLauncher launcher;
  run_moments(params, plan, where.workspace, row, launcher);
}

void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where) {
  EmulatedLauncher launcher;
  run_forward(params, plan, where.workspace, launcher);
}

void backward_moments(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  EmulatedLauncher launcher;
  run_backward_moments(params, plan, where.workspace, row, launcher);
}

void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where) {
  EmulatedLauncher launcher;
  run_backward(params, plan, where.workspace, launcher);
}

void convert(const void* from, int32_t from_dtype, void* to, int32_t to_dtype, int64_t count, void*) {
  for (int64_t i = 0; i < count; ++i) store_statistic(to, to_dtype, i, load_statistic(from, from_dtype, i, 0));
}

void copy_and_wait(void* to, const void* from, size_t bytes, bool, void*) { std::memcpy(to, from, bytes); }

}  // namespace bnexport::cuda
