// All that needs the CUDA runtime: the launcher, the device, and with them the kernels.
#include "kernels.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "launch.h"

namespace bnexport::cuda {

namespace {

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // it is reported here and must not surface in the caller's next check
  throw CudaError(std::string("CUDA: ") + what + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")");
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "the current device");
  if (device >= kMostDevices) throw CudaError("CUDA: more than 64 devices");
  return device;
}

// Whether something in this process uses the device; to make one current that nothing uses would create a context. Only
// the driver tells, whose library the runtime has loaded.
bool has_context(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto get_state =
      driver == nullptr ? nullptr : reinterpret_cast<GetState>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
  unsigned flags = 0;
  int active = 1;
  const bool is_told = get_state != nullptr && get_state(device, &flags, &active) == 0;
  if (driver != nullptr) dlclose(driver);
  return !is_told || active != 0;
}

// Of the current device; each is asked for once.
int attribute_of_device(cudaDeviceAttr attribute, std::array<std::atomic<int>, kMostDevices>& known) {
  const int device = current_device();
  int value = known[static_cast<size_t>(device)];
  if (value == 0) {
    check(cudaDeviceGetAttribute(&value, attribute, device), "properties of the device");
    known[static_cast<size_t>(device)] = value;
  }
  return value;
}

// Whether a launch may overlap the one before it, also while a graph is captured (drivers of CUDA 12.3 and newer).
bool can_overlap() {
  static const int driver = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  }();
  static std::array<std::atomic<int>, kMostDevices> known;
  return driver >= 12030 && attribute_of_device(cudaDevAttrComputeCapabilityMajor, known) >= 9;
}

class StreamLauncher {
 public:
  explicit StreamLauncher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  template <class Arguments>
  void launch(void (*kernel)(Arguments), int64_t blocks, const Arguments& arguments, bool overlaps) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream_;
    config.attrs = &attribute;
    config.numAttrs = overlaps && can_overlap() ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, arguments), "launch of a kernel");
  }

 private:
  cudaStream_t stream_;
};

}  // namespace

int runtime_version() { return CUDART_VERSION; }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

void check_device(int device) {
  static std::mutex mutex;
  static std::array<bool, kMostDevices> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (known[static_cast<size_t>(device)]) return;
  const int previous = set_device(device);
  cudaFuncAttributes attributes{};
  const cudaError_t code = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(forward_channels));
  cudaDeviceProp properties{};
  const bool named = cudaGetDeviceProperties(&properties, device) == cudaSuccess;
  if (previous >= 0) set_device(previous);
  if (code != cudaSuccess) {
    cudaGetLastError();
    const std::string name = named ? std::string(properties.name) + ", compute capability " +
                                         std::to_string(properties.major) + "." + std::to_string(properties.minor)
                                   : "device " + std::to_string(device);
    const std::string reason = name + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")";
    if (code != cudaErrorNoKernelImageForDevice && code != cudaErrorInvalidDeviceFunction) {
      throw CudaError("CUDA: cannot use " + reason);
    }
    throw NoKernels("CUDA: this library has no kernels for " + reason +
                    "; build it with that architecture in BNEXPORT_CUDA_ARCHITECTURES");
  }
  known[static_cast<size_t>(device)] = true;
}

int set_device(int device) {
  const int previous = current_device();
  if (previous == device) return previous;
  const bool is_used = has_context(previous);
  check(cudaSetDevice(device), "cudaSetDevice");
  return is_used ? previous : -1;
}

void wait(void* stream) { check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize"); }

int64_t multiprocessors() {
  static std::array<std::atomic<int>, kMostDevices> known;
  return attribute_of_device(cudaDevAttrMultiProcessorCount, known);
}

void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  run_forward(params, plan, where.workspace, StreamLauncher(where.stream), row);
}

void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  run_backward(params, plan, where.workspace, StreamLauncher(where.stream), row);
}

void copy_and_wait(void* to, const void* from, size_t bytes, bool to_host, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(to, from, bytes, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, queue), "copy");
  check(cudaStreamSynchronize(queue), "copy");
}

}  // namespace bnexport::cuda
