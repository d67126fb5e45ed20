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

static_assert(static_cast<int>(cuda::Strategy::kSplit) == BNEXPORT_CUDA_SPLIT, "the values of bnexport_cuda_strategy");

template <class Params>
void validate_sizes(const Params* params) {
  require_range("params.C", params->C, 0, cuda::kMostChannels);
  require_range("params.S", params->S, 0, cuda::kLongestRow);
}

// Whether statistics and output are made in one go.
bool in_one_launch(const bnexport_forward& params) { return params.training != 0 && params.group_size == 1; }
bool in_one_launch(const bnexport_backward& params) {
  return params.training != 0 && params.group_size == 1 && params.dx != nullptr;
}

// Tensors that are read for the output, and whether all start at a multiple of 16 bytes.
int64_t tensors(const bnexport_forward&) { return 1; }
int64_t tensors(const bnexport_backward&) { return 2; }
bool aligned(std::initializer_list<const void*> pointers) {
  const auto is_aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  return std::all_of(pointers.begin(), pointers.end(), is_aligned);
}
bool aligned(const bnexport_forward& params) { return aligned({params.x, params.y}); }
bool aligned(const bnexport_backward& params) { return aligned({params.dy, params.x, params.dx}); }

template <class Params>
cuda::Problem problem_of(const Params& params, bool is_aligned, bool one_launch) {
  return {params.N, params.C, params.S, params.dtype, params.layout, tensors(params), is_aligned, one_launch};
}

// What this thread prefers, for measurements.
thread_local cuda::Wish wish;
thread_local bool refuses = false;  // every launch of blocks that wait for each other

// What this thread's last call did.
thread_local cuda::LaunchPlan last;
thread_local bool last_refused = false;

// A wish is one for calls that make statistics and output in one go; the others have one way.
cuda::LaunchPlan plan_of(const cuda::Problem& problem) {
  const cuda::Wish granted = problem.one_launch ? wish : cuda::Wish{};
  const cuda::LaunchPlan plan = cuda::launch_plan(problem, cuda::device_properties(), granted);
  if (plan.strategy == cuda::Strategy::kAutomatic) {
    const auto strategy = static_cast<int>(wish.strategy);
    refuse("bnexport_cuda_prefer", std::to_string(strategy) + ", " + std::to_string(wish.cluster),
           "a strategy and a cluster size that this device can use for this tensor; 0, 0 lets the library choose");
  }
  return plan;
}

bnexport_cuda_plan described(const cuda::LaunchPlan& plan) {
  return {static_cast<int32_t>(plan.strategy), static_cast<int32_t>(plan.cluster), static_cast<int32_t>(plan.threads),
          static_cast<int32_t>(plan.shared), plan.blocks};
}

template <class Params>
void describe(const Params* params, bnexport_cuda_plan* result) {
  validate_common(params);
  validate_sizes(params);
  require_pointer("plan", result);
  *result = described(plan_of(problem_of(*params, aligned(*params), in_one_launch(*params))));
}

// Enough for every call with these sizes and types, however pointers are aligned.
template <class Params>
void query_workspace(const Params* params, size_t* bytes) {
  validate_common(params);
  validate_sizes(params);
  require_pointer("bytes", bytes);
  int64_t most = 0;
  if (in_one_launch(*params)) most = plan_of(problem_of(*params, aligned(*params), true)).workspace;
  for (const bool is_aligned : {true, false}) {
    most = std::max(most, plan_of(problem_of(*params, is_aligned, false)).workspace);
  }
  *bytes = static_cast<size_t>(most);
}

template <class Params>
cuda::LaunchPlan plan_of_call(const Params& params, bool one_launch, void* workspace, size_t bytes) {
  const cuda::LaunchPlan plan = plan_of(problem_of(params, aligned(params), one_launch));
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

// Statistics and output with the plan of the call; with the split one where the device refuses to start blocks
// that wait for each other. Nobody asked for that strategy: a wish is an error when it is refused.
template <class Params, class Run>
void run_with_plan(const Params& params, void* workspace, size_t bytes, const Run& run) {
  const bool one_launch = in_one_launch(params);
  const auto attempt = [&](bool together) {
    const cuda::LaunchPlan plan = plan_of_call(params, together, workspace, bytes);
    const bool waits = plan.cluster > 1 || plan.strategy == cuda::Strategy::kPersistent;
    if (refuses && waits) throw cuda::LaunchRefused("CUDA: launch of a kernel: refused, as bnexport_cuda_prefer says");
    run(plan);
    last = plan;
  };
  last_refused = false;
  try {
    attempt(one_launch);
  } catch (const cuda::LaunchRefused&) {
    if (!one_launch || wish.strategy != cuda::Strategy::kAutomatic) throw;
    attempt(false);
    last_refused = true;
  }
}

// guarded knows no CUDA errors: they are code 4.
template <class Body>
int cuda_guarded(char* error, size_t capacity, const Body& body) noexcept {
  bool from_cuda = false;
  const int code = guarded(error, capacity, [&] {
    try {
      body();
    } catch (const cuda::CudaError&) {
      from_cuda = true;
      throw;
    }
  });
  return from_cuda ? 4 : code;
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

int bnexport_cuda_prefer(int32_t strategy, int32_t cluster, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    require_range("strategy", strategy, 0, BNEXPORT_CUDA_REFUSED);
    require_range("cluster", cluster, 0, 16);
    refuses = strategy == BNEXPORT_CUDA_REFUSED;
    wish = {refuses ? cuda::Strategy::kAutomatic : static_cast<cuda::Strategy>(strategy), cluster};
  });
}

int bnexport_cuda_ran(bnexport_cuda_plan* plan, int32_t* refused, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    require_pointer("plan", plan);
    require_pointer("refused", refused);
    *plan = described(last);
    *refused = last_refused ? 1 : 0;
  });
}

int bnexport_cuda_plan_forward(const bnexport_forward* params, bnexport_cuda_plan* plan, char* error, size_t capacity) {
  return cuda_guarded(error, capacity, [&] { describe(params, plan); });
}
int bnexport_cuda_plan_backward(const bnexport_backward* params, bnexport_cuda_plan* plan, char* error,
                                size_t capacity) {
  return cuda_guarded(error, capacity, [&] { describe(params, plan); });
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
    cuda::moments(local, plan_of_call(local, false, workspace, bytes), {stream, workspace}, row);
  });
}

int bnexport_cuda_forward(const bnexport_forward* params, void* workspace, size_t bytes, void* stream, char* error,
                          size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    validate(params, false);
    validate_sizes(params);
    bnexport_forward local = *params;
    if (!local.training) local.group_size = 1;  // nothing is exchanged
    run_with_plan(local, workspace, bytes,
                  [&](const cuda::LaunchPlan& plan) { cuda::forward(local, plan, {stream, workspace}); });
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
    cuda::backward_moments(local, plan_of_call(local, false, workspace, bytes), {stream, workspace}, row);
  });
}

int bnexport_cuda_backward(const bnexport_backward* params, void* workspace, size_t bytes, void* stream, char* error,
                           size_t capacity) {
  return cuda_guarded(error, capacity, [&] {
    validate(params, false);
    validate_sizes(params);
    bnexport_backward local = *params;
    if (!local.training && local.grad_reduction == BNEXPORT_GRAD_LOCAL) local.group_size = 1;
    run_with_plan(local, workspace, bytes,
                  [&](const cuda::LaunchPlan& plan) { cuda::backward(local, plan, {stream, workspace}); });
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
