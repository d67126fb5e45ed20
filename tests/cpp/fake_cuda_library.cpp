// A stand-in for the CUDA library whose device is the host: the CPU kernels behind the same functions. Its
// "device" keeps a count of the bytes that were copied to the host, to see who waits for the device.
#include <cstring>

#include "../../custom_ops/kernels/statistics.h"
#include "bnexport_cuda.h"

namespace {

size_t bytes_to_host = 0;
constexpr size_t kWorkspace = 1000;

int need(bool holds, const char* what, char* error, size_t capacity) {
  if (holds) return 0;
  std::strncpy(error, what, capacity - 1);
  return 1;
}

}  // namespace

extern "C" {

BNEXPORT_API size_t fake_cuda_bytes_to_host() { return bytes_to_host; }

uint32_t bnexport_cuda_abi_version(void) { return BNEXPORT_CUDA_ABI_VERSION; }
const char* bnexport_cuda_version(void) { return "fake"; }
int bnexport_cuda_device_count(void) { return 1; }
int bnexport_cuda_prefer(int32_t, int32_t, char*, size_t) { return 0; }
int bnexport_cuda_plan_forward(const bnexport_forward*, bnexport_cuda_plan*, char*, size_t) { return 1; }
int bnexport_cuda_plan_backward(const bnexport_backward*, bnexport_cuda_plan*, char*, size_t) { return 1; }

int bnexport_cuda_forward_workspace(const bnexport_forward*, size_t* bytes, char*, size_t) {
  *bytes = kWorkspace;
  return 0;
}
int bnexport_cuda_backward_workspace(const bnexport_backward*, size_t* bytes, char*, size_t) {
  *bytes = kWorkspace;
  return 0;
}
int bnexport_cuda_moments(const bnexport_forward* params, double* row, void* workspace, size_t bytes, void*,
                          char* error, size_t capacity) {
  if (need(bytes == kWorkspace, "workspace", error, capacity) != 0) return 1;
  std::memset(workspace, 0xff, bytes);
  return bnexport_cpu_moments(params, row, error, capacity);
}
int bnexport_cuda_forward(const bnexport_forward* params, void* workspace, size_t bytes, void*, char* error,
                          size_t capacity) {
  if (need(bytes == kWorkspace, "workspace", error, capacity) != 0) return 1;
  std::memset(workspace, 0xff, bytes);
  return bnexport_cpu_forward(params, error, capacity);
}
int bnexport_cuda_backward_moments(const bnexport_backward* params, double* row, void* workspace, size_t bytes, void*,
                                   char* error, size_t capacity) {
  if (need(bytes == kWorkspace, "workspace", error, capacity) != 0) return 1;
  std::memset(workspace, 0xff, bytes);
  return bnexport_cpu_backward_moments(params, row, error, capacity);
}
int bnexport_cuda_backward(const bnexport_backward* params, void* workspace, size_t bytes, void*, char* error,
                           size_t capacity) {
  if (need(bytes == kWorkspace, "workspace", error, capacity) != 0) return 1;
  std::memset(workspace, 0xff, bytes);
  return bnexport_cpu_backward(params, error, capacity);
}
int bnexport_cuda_convert(const void* from, int32_t from_dtype, void* to, int32_t to_dtype, int64_t count, void*, char*,
                          size_t) {
  for (int64_t i = 0; i < count; ++i) {
    bnexport::store_statistic(to, to_dtype, i, bnexport::load_statistic(from, from_dtype, i, 0));
  }
  return 0;
}
int bnexport_cuda_copy(void* to, const void* from, size_t bytes, int32_t to_host, void*, char*, size_t) {
  if (to_host != 0) bytes_to_host += bytes;
  std::memcpy(to, from, bytes);
  return 0;
}

}  // extern "C"
