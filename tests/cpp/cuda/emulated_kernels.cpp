// The CUDA library on the emulated device: with cuda_capi.cpp it has the same C API, and host memory is its
// device memory. The loader and the verification of the benchmark are tested with it.
#include <cstring>
#include <utility>

#include "../../../custom_ops/kernels/cuda/kernels.h"
#include "emulated_launcher.h"

namespace bnexport::cuda {

namespace {

bool has_kernels = true;
int current = 0;
// Few, so that small tensors have several parts.
int64_t multiprocessor_count = 6;

// Every call runs its threads and blocks in another order.
EmulatedLauncher launcher;

}  // namespace

// The device refuses every kernel; has that many multiprocessors. For tests.
extern "C" __attribute__((visibility("default"))) void emulated_refuse(bool refuses) { has_kernels = !refuses; }
extern "C" __attribute__((visibility("default"))) void emulated_resize(int64_t count) { multiprocessor_count = count; }

// Counts bytes from now on, or for a negative value no more; returns those counted so far.
extern "C" __attribute__((visibility("default"))) int64_t emulated_traffic(int64_t from) {
  return std::exchange(emulator::traffic, from);
}

int runtime_version() { return 12090; }
int device_count() { return 1; }

void check_device(int) {
  if (!has_kernels) throw NoKernels("CUDA: this library has no kernels for Emulated, compute capability 0.1");
}

int set_device(int device) {
  const int previous = current;
  current = device;
  return previous;
}

void wait(void*) {}
int64_t multiprocessors() { return multiprocessor_count; }

void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  run_forward(params, plan, where.workspace, launcher, row);
}

void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  run_backward(params, plan, where.workspace, launcher, row);
}

void copy_and_wait(void* to, const void* from, size_t bytes, bool, void*) { std::memcpy(to, from, bytes); }

}  // namespace bnexport::cuda
