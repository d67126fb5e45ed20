// The C API of bnexport_cuda.h: validation and plan, then the kernels.
#include <algorithm>
#include <initializer_list>
#include <string>

#include "../kernels/cuda/kernels.h"
#include "bnexport_cuda.h"
#include "validation.h"

namespace {

using namespace bnexport;
using namespace bnexport::capi;

template <class Params>
void validate_sizes(const Params* params) {
  require_range("params.C", params->C, 0, cuda::kMostChannels);
  require_range("params.S", params->S, 0, cuda::kLongestRow);
}

// Whether all tensors start at a multiple of 16 bytes.
bool aligned(std::initializer_list<const void*> pointers) {
  const auto is_aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  return std::all_of(pointers.begin(), pointers.end(), is_aligned);
}
bool aligned(const bnexport_forward& params) { return aligned({params.x, params.y}); }
bool aligned(const bnexport_backward& params) { return aligned({params.dy, params.x, params.dx}); }

template <class Params>
cuda::LaunchPlan plan_of(const Params& params, bool is_aligned) {
  return cuda::launch_plan({params.N, params.C, params.S, params.dtype, params.layout, is_aligned},
                           cuda::multiprocessors());
}

// Enough for every call with these sizes and types, however pointers are aligned.
template <class Params>
void query_workspace(const Params* params, size_t* bytes) {
  validate_common(params);
  validate_sizes(params);
  require_pointer("bytes", bytes);
  *bytes = static_cast<size_t>(std::max(plan_of(*params, true).workspace, plan_of(*params, false).workspace));
}

template <class Params>
cuda::LaunchPlan plan_of_call(const Params& params, void* workspace, size_t bytes) {
  const cuda::LaunchPlan plan = plan_of(params, aligned(params));
  if (bytes < static_cast<size_t>(plan.workspace)) {
    refuse("bytes of the workspace", std::to_string(bytes),
           std::to_string(plan.workspace) + " or more, as the query of the workspace returns");
  }
  if (plan.workspace > 0) require_pointer("workspace", workspace);
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    refuse("workspace", "an address that is not a multiple of 256", "one that is");
  }
  return plan;
}

// guarded knows no CUDA errors: they are codes 4 and 5.
template <class Body>
int cuda_guarded(char* error, size_t capacity, const Body& body) noexcept {
  int of_cuda = 0;
  const int code = guarded(error, capacity, [&] {
    try {
      body();
    } catch (const cuda::NoKernels&) {
      of_cuda = 5;
      throw;
    } catch (const cuda::CudaError&) {
      of_cuda = 4;
      throw;
    }
  });
  return of_cuda != 0 ? of_cuda : code;
}

}  // namespace

extern "C" {

uint32_t bnexport_cuda_abi_version(void) { return BNEXPORT_CUDA_ABI_VERSION; }
const char* bnexport_cuda_version(void) { return BNEXPORT_VERSION; }
int bnexport_cuda_runtime_version(void) { return cuda::runtime_version(); }
int bnexport_cuda_device_count(void) { return cuda::device_count(); }

int bnexport_cuda_check_device(int32_t device, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    require_range("device", device, 0, cuda::kMostDevices - 1);
    cuda::check_device(device);
  });
}

int bnexport_cuda_set_device(int32_t device, int32_t* previous, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    require_range("device", device, 0, cuda::kMostDevices - 1);
    require_pointer("previous", previous);
    *previous = cuda::set_device(device);
  });
}

int bnexport_cuda_wait(void* stream, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] { cuda::wait(stream); });
}

int bnexport_cuda_forward_workspace(const bnexport_forward* params, size_t* bytes, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] { query_workspace(params, bytes); });
}
int bnexport_cuda_backward_workspace(const bnexport_backward* params, size_t* bytes, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] { query_workspace(params, bytes); });
}

int bnexport_cuda_moments(const bnexport_forward* params, double* row, void* workspace, size_t bytes, void* stream,
                          char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    validate(params, true);
    validate_sizes(params);
    require_pointer("row", row);
    bnexport_forward local = *params;
    local.y = nullptr;
    cuda::forward(local, plan_of_call(local, workspace, bytes), {stream, workspace}, row);
  });
}

int bnexport_cuda_forward(const bnexport_forward* params, void* workspace, size_t bytes, void* stream, char* error,
                          size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    validate(params, false);
    validate_sizes(params);
    bnexport_forward local = *params;
    if (!local.training) local.group_size = 1;  // nothing is exchanged
    cuda::forward(local, plan_of_call(local, workspace, bytes), {stream, workspace});
  });
}

int bnexport_cuda_backward_moments(const bnexport_backward* params, double* row, void* workspace, size_t bytes,
                                   void* stream, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    validate(params, true);
    validate_sizes(params);
    require_pointer("row", row);
    bnexport_backward local = *params;
    local.dx = nullptr;
    cuda::backward(local, plan_of_call(local, workspace, bytes), {stream, workspace}, row);
  });
}

int bnexport_cuda_backward(const bnexport_backward* params, void* workspace, size_t bytes, void* stream, char* error,
                           size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    validate(params, false);
    validate_sizes(params);
    bnexport_backward local = *params;
    if (!local.training && local.grad_reduction == BNEXPORT_GRAD_LOCAL) local.group_size = 1;
    cuda::backward(local, plan_of_call(local, workspace, bytes), {stream, workspace});
  });
}

int bnexport_cuda_copy(void* to, const void* from, size_t bytes, int32_t to_host, void* stream, char* error,
                       size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    require_range("to_host", to_host, 0, 1);
    if (bytes == 0) return;
    require_pointer("from", from);
    require_pointer("to", to);
    cuda::copy_and_wait(to, from, bytes, to_host != 0, stream);
  });
}

}  // extern "C"
