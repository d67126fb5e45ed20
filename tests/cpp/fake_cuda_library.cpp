// A stand-in for the CUDA library whose device is the host: the CPU kernels behind the same functions.
//
// Without a stream, work runs at once; on a FakeQueue it runs when the test says so, in two steps: one that uses
// the workspace, one that relies on it. Every call checks that the stream's device is the current one. A count
// tells who waits for the device.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "../../custom_ops/kernels/common/statistics.h"
#include "bnexport_cuda.h"
#include "fake_streams.h"

namespace {

std::atomic<int64_t> waits{0};
std::atomic<int64_t> next_token{1};
thread_local int32_t current_device = 0;
thread_local bool is_first_used = false;  // device 0, which is current first
constexpr size_t kWorkspace = 1000;

int fail(const char* what, char* error, size_t capacity) {
  if (capacity > 0) std::strncpy(error, what, capacity - 1);
  return 1;
}

// Enqueues, or runs at once on no stream.
template <class Step>
void on(void* stream, const Step& step) {
  if (stream == nullptr) {
    step();
  } else {
    static_cast<FakeQueue*>(stream)->push(step);
  }
}

const char* wrong_place(void* stream) {
  const bool here = stream == nullptr || static_cast<FakeQueue*>(stream)->device == current_device;
  return here ? nullptr : "enqueued on a stream of another device than the current one";
}

// The two steps of a kernel call: `run` works when the workspace still holds what the first step wrote,
// `spoil` stands for the result when it does not.
template <class Run, class Spoil>
int two_steps(void* workspace, size_t bytes, void* stream, char* error, size_t capacity, const Run& run,
              const Spoil& spoil) {
  if (bytes != kWorkspace) return fail("workspace", error, capacity);
  if (const char* const wrong = wrong_place(stream)) return fail(wrong, error, capacity);
  const int64_t token = next_token++;
  on(stream, [=] {
    std::memset(workspace, 0xff, bytes);
    std::memcpy(workspace, &token, sizeof(token));
  });
  int code = 0;
  const auto second = [=](char* text, size_t size) {
    int64_t found = 0;
    std::memcpy(&found, workspace, sizeof(found));
    if (found != token) {
      spoil();
      return 0;
    }
    return run(text, size);
  };
  if (stream == nullptr) {
    code = second(error, capacity);
  } else {
    on(stream, [=] { second(nullptr, 0); });
  }
  return code;
}

void spoil_numbers(double* numbers, int64_t count) {
  for (int64_t i = 0; numbers != nullptr && i < count; ++i) numbers[i] = std::numeric_limits<double>::quiet_NaN();
}
void spoil_data(void* data, int32_t dtype, int64_t count) {
  const int64_t size = dtype == BNEXPORT_FLOAT64 ? 8 : dtype == BNEXPORT_FLOAT32 ? 4 : 2;
  if (data != nullptr) std::memset(data, 0xff, static_cast<size_t>(size * count));
}

// The CPU kernels know saved statistics in double alone.
int run_forward(bnexport_forward p, char* error, size_t capacity) {
  void* const to[2] = {p.saved_mean, p.saved_invstd};
  std::vector<double> saved(static_cast<size_t>(2 * p.C));
  if (p.saved_as_statistics != 0) {
    p.saved_mean = saved.data();
    p.saved_invstd = saved.data() + p.C;
  }
  const bool narrow = p.saved_as_statistics != 0;
  p.saved_as_statistics = 0;
  const int code = bnexport_cpu_forward(&p, error, capacity);
  for (int64_t i = 0; narrow && i < 2 * p.C; ++i) {
    bnexport::store_statistic(to[i / p.C], p.stats_dtype, i % p.C, saved[static_cast<size_t>(i)]);
  }
  return code;
}
template <class Run>
int run_backward(bnexport_backward p, const Run& run) {
  std::vector<double> saved(static_cast<size_t>(2 * p.C));
  const void* const from[2] = {p.saved_mean, p.saved_invstd};
  if (p.saved_as_statistics != 0) {
    for (int64_t i = 0; i < 2 * p.C; ++i) {
      saved[static_cast<size_t>(i)] = bnexport::load_statistic(from[i / p.C], p.stats_dtype, i % p.C, 0);
    }
    p.saved_mean = saved.data();
    p.saved_invstd = saved.data() + p.C;
    p.saved_as_statistics = 0;
  }
  return run(p);
}

}  // namespace

extern "C" {

BNEXPORT_API int64_t fake_cuda_waits() { return waits; }
BNEXPORT_API int32_t fake_cuda_current_device() { return current_device; }
BNEXPORT_API void fake_cuda_use_first(bool used) { is_first_used = used; }

uint32_t bnexport_cuda_abi_version(void) { return BNEXPORT_CUDA_ABI_VERSION; }
const char* bnexport_cuda_version(void) { return BNEXPORT_VERSION; }
int bnexport_cuda_device_count(void) { return 2; }
int bnexport_cuda_check_device(int32_t, char*, size_t) { return 0; }
int bnexport_cuda_set_device(int32_t device, int32_t* previous, char* error, size_t capacity) {
  if (device < 0 || device > 1) return fail("no such device", error, capacity);
  *previous = current_device == 0 && !is_first_used ? -1 : current_device;
  current_device = device;
  return 0;
}
int bnexport_cuda_wait(void* stream, char* error, size_t capacity) {
  if (const char* const wrong = wrong_place(stream)) return fail(wrong, error, capacity);
  waits += 1;
  if (stream != nullptr) static_cast<FakeQueue*>(stream)->finish();
  return 0;
}

int bnexport_cuda_forward_workspace(const bnexport_forward*, size_t* bytes, char*, size_t) {
  *bytes = kWorkspace;
  return 0;
}
int bnexport_cuda_backward_workspace(const bnexport_backward*, size_t* bytes, char*, size_t) {
  *bytes = kWorkspace;
  return 0;
}
int bnexport_cuda_moments(const bnexport_forward* params, double* row, void* workspace, size_t bytes, void* stream,
                          char* error, size_t capacity) {
  bnexport_forward p = *params;
  p.saved_as_statistics = 0;  // none are written
  return two_steps(
      workspace, bytes, stream, error, capacity,
      [=](char* text, size_t size) { return bnexport_cpu_moments(&p, row, text, size); },
      [=] { spoil_numbers(row, 2 * p.C + 1); });
}
int bnexport_cuda_forward(const bnexport_forward* params, void* workspace, size_t bytes, void* stream, char* error,
                          size_t capacity) {
  const bnexport_forward p = *params;
  return two_steps(
      workspace, bytes, stream, error, capacity, [=](char* text, size_t size) { return run_forward(p, text, size); },
      [=] { spoil_data(p.y, p.dtype, p.N * p.C * p.S); });
}
int bnexport_cuda_backward_moments(const bnexport_backward* params, double* row, void* workspace, size_t bytes,
                                   void* stream, char* error, size_t capacity) {
  const bnexport_backward p = *params;
  return two_steps(
      workspace, bytes, stream, error, capacity,
      [=](char* text, size_t size) {
        return run_backward(
            p, [&](const bnexport_backward& q) { return bnexport_cpu_backward_moments(&q, row, text, size); });
      },
      [=] { spoil_numbers(row, 2 * p.C + 1); });
}
int bnexport_cuda_backward(const bnexport_backward* params, void* workspace, size_t bytes, void* stream, char* error,
                           size_t capacity) {
  const bnexport_backward p = *params;
  return two_steps(
      workspace, bytes, stream, error, capacity,
      [=](char* text, size_t size) {
        return run_backward(p, [&](const bnexport_backward& q) { return bnexport_cpu_backward(&q, text, size); });
      },
      [=] { spoil_data(p.dx, p.dtype, p.N * p.C * p.S); });
}
int bnexport_cuda_copy(void* to, const void* from, size_t bytes, int32_t, void* stream, char* error, size_t capacity) {
  if (const char* const wrong = wrong_place(stream)) return fail(wrong, error, capacity);
  if (stream != nullptr) static_cast<FakeQueue*>(stream)->finish();
  std::memcpy(to, from, bytes);
  return 0;
}

}  // extern "C"
