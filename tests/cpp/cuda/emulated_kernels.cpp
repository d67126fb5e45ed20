// The CUDA library on the emulated device: with cuda_capi.cpp it has the same C API, and host memory is its
// device memory. The loader and the verification of the benchmark are tested with it.
#include <cstring>

#include "../../../custom_ops/kernels/common/statistics_definitions.h"
#include "../../../custom_ops/kernels/cuda/kernels.h"
#include "emulated_launcher.h"

namespace bnexport::cuda {

namespace {

// What the device refuses; set by tests.
enum Refusal { kNone = 0, kTogether = 1, kAnyKernel = 2 };
int refusal = kNone;
int current = 0;

}  // namespace

extern "C" __attribute__((visibility("default"))) void emulated_refuse(int what) { refusal = what; }

int runtime_version() { return 12090; }
int device_count() { return 1; }

void check_device(int) {
  if (refusal == kAnyKernel) throw CudaError("CUDA: this library has no kernels for Emulated, compute capability 0.1");
}

int set_device(int device) {
  const int previous = current;
  current = device;
  return previous;
}

void* mark(void*) { return &current; }
bool passed(void*, bool) { return true; }

// Little of everything, so that small tensors take all the ways.
const DeviceProperties& device_properties() {
  static const DeviceProperties properties{6, 24 << 10, 32 << 10, 1024, 96 << 10, 16};
  return properties;
}

void moments(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  EmulatedLauncher launcher;
  run_moments(params, plan, where.workspace, row, launcher);
}

namespace {

void start(const LaunchPlan& plan) {
  const bool together = plan.cluster > 1 || plan.strategy == Strategy::kPersistent;
  if (refusal == kTogether && together) throw LaunchRefused("CUDA: launch of a kernel: refused");
}

}  // namespace

void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where) {
  start(plan);
  EmulatedLauncher launcher;
  run_forward(params, plan, where.workspace, launcher);
}

void backward_moments(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  EmulatedLauncher launcher;
  run_backward_moments(params, plan, where.workspace, row, launcher);
}

void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where) {
  start(plan);
  EmulatedLauncher launcher;
  run_backward(params, plan, where.workspace, launcher);
}

void copy_and_wait(void* to, const void* from, size_t bytes, bool, void*) { std::memcpy(to, from, bytes); }

}  // namespace bnexport::cuda
