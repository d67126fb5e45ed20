// All that needs the CUDA runtime: the launcher, the device's properties, and with them the kernels.
#include "kernels.h"

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "../statistics_definitions.h"
#include "launch.h"

namespace bnexport::cuda {

namespace {

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // it is reported here and must not surface in the caller's next check
  throw CudaError(std::string("CUDA: ") + what + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")");
}

constexpr int64_t kSharedWithoutAsking = 48 << 10;
constexpr int64_t kPortableCluster = 8;

// Asked for at each launch: it takes less than a microsecond, and kernels are loaded once per device.
void allow(const void* kernel, int64_t shared, int64_t cluster) {
  if (shared > kSharedWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          "shared memory of a kernel");
  }
  if (cluster > kPortableCluster) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "a kernel's cluster size");
  }
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

struct StreamLauncher {
  cudaStream_t stream;

  template <class Arguments>
  void launch(void (*kernel)(Arguments), const Launch& launch, const Arguments& arguments) {
    allow(reinterpret_cast<const void*>(kernel), launch.shared, launch.cluster);
    const Configuration configuration(launch, stream);
    check(cudaLaunchKernelEx(&configuration.config, kernel, arguments), "launch of a kernel");
  }
  void zero(void* memory, int64_t bytes) {
    check(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream), "memset of the workspace");
  }
};

BNEXPORT_KERNEL(kSplitBlockThreads, 2)
convert_statistics(const void* from, int32_t from_dtype, void* to, int32_t to_dtype, int64_t count) {
  const int64_t i = int64_t{block_index()} * thread_count() + thread_index();
  if (i < count) store_statistic(to, to_dtype, i, load_statistic(from, from_dtype, i, 0));
}

// Clusters of 16 are not portable: a device has some only where that many multiprocessors share a
// graphics processing cluster.
int64_t largest_cluster(int device, int64_t shared) {
  int has_clusters = 0;
  check(cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, device), "properties of the device");
  if (has_clusters == 0) return 1;
  const auto* kernel = reinterpret_cast<const void*>(cluster_forward<Vector<Float32, 4>>);
  for (const int64_t size : {int64_t{kLargestCluster}, kPortableCluster, int64_t{4}, int64_t{2}}) {
    allow(kernel, shared, size);
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

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

const DeviceProperties& device_properties() {
  constexpr int kMostDevices = 64;
  static std::mutex mutex;
  static std::array<std::unique_ptr<const DeviceProperties>, kMostDevices> known;
  int device = 0;
  check(cudaGetDevice(&device), "the current device");
  if (device >= kMostDevices) throw CudaError("CUDA: more than 64 devices");
  const std::lock_guard<std::mutex> lock(mutex);
  auto& properties = known[static_cast<size_t>(device)];
  if (properties == nullptr) properties = std::make_unique<const DeviceProperties>(ask(device));
  return *properties;
}

void moments(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  StreamLauncher launcher{static_cast<cudaStream_t>(where.stream)};
  run_moments(params, plan, where.workspace, row, launcher);
}

void forward(const bnexport_forward& params, const LaunchPlan& plan, const Workplace& where) {
  StreamLauncher launcher{static_cast<cudaStream_t>(where.stream)};
  run_forward(params, plan, where.workspace, launcher);
}

void backward_moments(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where, double* row) {
  StreamLauncher launcher{static_cast<cudaStream_t>(where.stream)};
  run_backward_moments(params, plan, where.workspace, row, launcher);
}

void backward(const bnexport_backward& params, const LaunchPlan& plan, const Workplace& where) {
  StreamLauncher launcher{static_cast<cudaStream_t>(where.stream)};
  run_backward(params, plan, where.workspace, launcher);
}

void convert(const void* from, int32_t from_dtype, void* to, int32_t to_dtype, int64_t count, void* stream) {
  const int64_t blocks = (count + kSplitBlockThreads - 1) / kSplitBlockThreads;
  const Configuration configuration({blocks, kSplitBlockThreads, 0, 1, false}, static_cast<cudaStream_t>(stream));
  check(cudaLaunchKernelEx(&configuration.config, convert_statistics, from, from_dtype, to, to_dtype, count),
        "launch of a kernel");
}

void copy_and_wait(void* to, const void* from, size_t bytes, bool to_host, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(to, from, bytes, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, queue), "copy");
  check(cudaStreamSynchronize(queue), "copy");
}

}  // namespace bnexport::cuda
