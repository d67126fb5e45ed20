// A stand-in for the CUDA library whose device is the host, with simple formulas behind the same functions.
//
// Without a stream, work runs at once; on a FakeQueue it runs when the test says so, in two steps: one that uses
// the workspace, one that relies on it, and gives NaN where another call has used it in between. Every call checks that
// the stream's device is the current one. A count tells who waits for the device.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

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

// The two steps of a call; run(unit) writes multiples of `unit`: 1, or NaN.
template <class Run>
int two_steps(void* workspace, size_t bytes, void* stream, char* error, size_t capacity, const Run& run) {
  if (bytes != kWorkspace) return fail("workspace", error, capacity);
  if (const char* const wrong = wrong_place(stream)) return fail(wrong, error, capacity);
  const int64_t token = next_token++;
  on(stream, [=] {
    std::memset(workspace, 0xff, bytes);
    std::memcpy(workspace, &token, sizeof(token));
  });
  on(stream, [=] {
    int64_t found = 0;
    std::memcpy(&found, workspace, sizeof(found));
    run(found == token ? 1.0 : std::numeric_limits<double>::quiet_NaN());
  });
  return 0;
}

// Statistics as the adapters ask for them, in the statistics' type; nothing where they are absent.
void put(void* to, int64_t c, double value) {
  if (to != nullptr) static_cast<float*>(to)[c] = static_cast<float>(value);
}
double get(const void* from, int64_t i) { return static_cast<double>(static_cast<const float*>(from)[i]); }

// A row of moments is made of the first values; what is made of rows, of the last process's.
void fill_row(const void* x, int64_t C, double* row, double unit) {
  for (int64_t i = 0; i < 2 * C + 1; ++i) row[i] = unit * get(x, i % C);
}
template <class Params>
double moment(const Params& p, int64_t c) {
  return p.gathered == nullptr ? get(p.x, c) : p.gathered[(p.group_size - 1) * (2 * p.C + 1) + c];
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
  const bnexport_forward p = *params;
  return two_steps(workspace, bytes, stream, error, capacity, [=](double unit) { fill_row(p.x, p.C, row, unit); });
}
int bnexport_cuda_forward(const bnexport_forward* params, void* workspace, size_t bytes, void* stream, char* error,
                          size_t capacity) {
  const bnexport_forward p = *params;
  return two_steps(workspace, bytes, stream, error, capacity, [=](double unit) {
    for (int64_t c = 0; c < p.C; ++c) {
      for (void* to : {p.running_mean_out, p.running_var_out, static_cast<void*>(p.saved_mean)})
        put(to, c, unit * moment(p, c));
      put(p.saved_invstd, c, 2 * unit * moment(p, c));
    }
    for (int64_t i = 0; i < p.N * p.C * p.S; ++i) put(p.y, i, unit * (get(p.x, i) + moment(p, i % p.C)));
  });
}
int bnexport_cuda_backward_moments(const bnexport_backward* params, double* row, void* workspace, size_t bytes,
                                   void* stream, char* error, size_t capacity) {
  const bnexport_backward p = *params;
  return two_steps(workspace, bytes, stream, error, capacity, [=](double unit) { fill_row(p.x, p.C, row, unit); });
}
int bnexport_cuda_backward(const bnexport_backward* params, void* workspace, size_t bytes, void* stream, char* error,
                           size_t capacity) {
  const bnexport_backward p = *params;
  return two_steps(workspace, bytes, stream, error, capacity, [=](double unit) {
    for (int64_t c = 0; c < p.C; ++c) {
      put(p.dweight, c, unit * moment(p, c));
      put(p.dbias, c, 2 * unit * moment(p, c));
    }
    for (int64_t i = 0; i < p.N * p.C * p.S; ++i) put(p.dx, i, unit * (get(p.dy, i) + get(p.x, i)));
  });
}
int bnexport_cuda_copy(void* to, const void* from, size_t bytes, int32_t, void* stream, char* error, size_t capacity) {
  if (const char* const wrong = wrong_place(stream)) return fail(wrong, error, capacity);
  if (stream != nullptr) static_cast<FakeQueue*>(stream)->finish();
  std::memcpy(to, from, bytes);
  return 0;
}

}  // extern "C"
