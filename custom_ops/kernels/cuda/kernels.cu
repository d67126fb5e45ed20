// All that needs the CUDA runtime: the launcher, the device's properties, and with them the kernels.
#include "kernels.h"

#include <dlfcn.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "../common/statistics_definitions.h"
#include "kernel_attributes.h"
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

struct Configuration {
  std::array<cudaLaunchAttribute, 2> attributes{};
  cudaLaunchConfig_t config{};

  Configuration(const Launch& launch, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
    config.blockDim = dim3(static_cast<unsigned>(launch.threads));
    config.dynamicSmemBytes = static_cast<size_t>(launch.shared);
    config.stream = stream;
    config.attrs = attributes.data();
    if (launch.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(launch.cluster);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    if (launch.cooperative) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    }
  }
};

// What a launch of blocks that wait for each other returns where they cannot all start.
bool is_refusal(cudaError_t code) {
  return code == cudaErrorCooperativeLaunchTooLarge || code == cudaErrorLaunchOutOfResources ||
         code == cudaErrorInvalidClusterSize || code == cudaErrorNotSupported || code == cudaErrorNotPermitted;
}

class StreamLauncher {
 public:
  explicit StreamLauncher(void* stream)
      : stream_(static_cast<cudaStream_t>(stream)),
        device_(current_device()),
        most_shared_(device_properties().shared_per_block) {}

  template <class Arguments>
  void launch(void (*kernel)(Arguments), const Launch& launch, const Arguments& arguments) {
    const auto* address = reinterpret_cast<const void*>(kernel);
    check(allow(address, device_, launch.shared, launch.cluster, most_shared_), "attributes of a kernel");
    const Configuration configuration(launch, stream_);
    const cudaError_t code = cudaLaunchKernelEx(&configuration.config, kernel, arguments);
    if ((launch.cooperative || launch.cluster > 1) && is_refusal(code)) {
      cudaGetLastError();
      throw LaunchRefused(std::string("CUDA: launch of a kernel: ") + cudaGetErrorName(code));
    }
    check(code, "launch of a kernel");
  }
  void zero(void* memory, int64_t bytes) {
    check(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream_), "memset of the workspace");
  }

 private:
  cudaStream_t stream_;
  int device_;
  int64_t most_shared_;
};

// Clusters of 16 are not portable: a device has some only where that many multiprocessors share a
// graphics processing cluster.
int64_t largest_cluster(int device, int64_t shared) {
  int has_clusters = 0;
  check(cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, device), "properties of the device");
  if (has_clusters == 0) return 1;
  const auto* kernel = reinterpret_cast<const void*>(cluster_forward<Vector<Float32, 4>>);
  for (const int64_t size : {int64_t{kLargestCluster}, kPortableCluster, int64_t{4}, int64_t{2}}) {
    check(allow(kernel, device, shared, size, shared), "attributes of a kernel");
    const Configuration configuration({size, kForwardClusterThreads, shared, size, false}, nullptr);
    int active = 0;
    const cudaError_t code = cudaOccupancyMaxActiveClusters(&active, kernel, &configuration.config);
    if (code == cudaSuccess && active > 0) return size;
    cudaGetLastError();
  }
  return 1;
}

DeviceProperties ask(int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "properties of the device");
    return static_cast<int64_t>(value);
  };
  DeviceProperties properties;
  properties.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  properties.shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties.shared_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties.shared_reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  properties.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  properties.largest_cluster = largest_cluster(device, properties.shared_per_block);
  return properties;
}

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
    throw CudaError("CUDA: this library has no kernels for " + reason +
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

const DeviceProperties& device_properties() {
  static std::mutex mutex;
  static std::array<std::unique_ptr<const DeviceProperties>, kMostDevices> known;
  const int device = current_device();
  const std::lock_guard<std::mutex> lock(mutex);
  auto& properties = known[static_cast<size_t>(device)];
  if (properties == nullptr) properties = std::make_unique<const DeviceProperties>(ask(device));
  return *properties;
}

void moments(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  StreamLauncher launcher(where.stream);
  run_moments(params, plan, where.workspace, row, launcher);
}

void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where) {
  StreamLauncher launcher(where.stream);
  run_forward(params, plan, where.workspace, launcher);
}

void backward_moments(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  StreamLauncher launcher(where.stream);
  run_backward_moments(params, plan, where.workspace, row, launcher);
}

void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where) {
  StreamLauncher launcher(where.stream);
  run_backward(params, plan, where.workspace, launcher);
}

void copy_and_wait(void* to, const void* from, size_t bytes, bool to_host, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(to, from, bytes, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, queue), "copy");
  check(cudaStreamSynchronize(queue), "copy");
}

}  // namespace bnexport::cuda
