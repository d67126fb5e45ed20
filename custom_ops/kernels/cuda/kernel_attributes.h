// Attributes set before the launch of a kernel that exceeds the default limits.
//
// The limits are a kernel's on a device, for all threads and streams: set to the size of one launch, they would
// take from another thread's launch what it had just asked for. So they are set once, to the most that the
// device gives.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <tuple>

namespace bnexport::cuda {

constexpr int64_t kSharedWithoutAsking = 48 << 10;
constexpr int64_t kPortableCluster = 8;

// `device` is the current one, `most_shared` what it gives a block. The first call for a kernel and device that
// needs more sets the limits; later ones look up that it was done.
inline cudaError_t allow(const void* kernel, int device, int64_t shared, int64_t cluster, int64_t most_shared) {
  const bool is_large = shared > kSharedWithoutAsking, has_large_cluster = cluster > kPortableCluster;
  if (!is_large && !has_large_cluster) return cudaSuccess;
  static std::mutex mutex;
  static std::set<std::tuple<const void*, int, bool, bool>> done;
  const std::scoped_lock lock(mutex);
  const auto key = std::make_tuple(kernel, device, is_large, has_large_cluster);
  if (done.count(key) != 0) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  const auto set = [&](cudaFuncAttribute attribute, int64_t value) {
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, attribute, static_cast<int>(value));
  };
  if (is_large) {
    set(cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
    // Plans count on two blocks of 114 KB on a multiprocessor.
    set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (has_large_cluster) set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess) done.insert(key);
  return error;
}

}  // namespace bnexport::cuda
