// Limits of kernels are set once for each kernel and device, to what the device gives: threads that launch with
// different sizes at the same time do not take memory from each other.
#include "../../custom_ops/kernels/cuda/kernel_attributes.h"

#include <thread>
#include <vector>

#include "check.h"

using bnexport::cuda::allow;

namespace {

constexpr int64_t kMost = 232448;
const int kernels[2] = {};

int limit(int kernel, int device, cudaFuncAttribute attribute) {
  const std::scoped_lock lock(fake_attributes_mutex);
  const auto found = fake_attributes.find({&kernels[kernel], device, attribute});
  return found == fake_attributes.end() ? -1 : found->second;
}

void small_launches_ask_for_nothing() {
  CHECK(allow(&kernels[0], 0, 48 << 10, 8, kMost) == cudaSuccess);
  CHECK(fake_attributes_set == 0);
}

void concurrent_launches_keep_their_memory() {
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      const int device = t % 2;
      cudaSetDevice(device);
      for (int i = 0; i < 500; ++i) {
        const int64_t shared = int64_t{50 + (t * 31 + i) % 170} * 1024;
        CHECK(allow(&kernels[0], device, shared, 4, kMost) == cudaSuccess);
        CHECK(limit(0, device, cudaFuncAttributeMaxDynamicSharedMemorySize) >= shared);
        CHECK(limit(0, device, cudaFuncAttributePreferredSharedMemoryCarveout) == cudaSharedmemCarveoutMaxShared);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(fake_attributes_set == 2 * 2);  // two attributes on each of two devices
}

void large_clusters_are_asked_for_where_they_are_used() {
  CHECK(limit(0, 0, cudaFuncAttributeNonPortableClusterSizeAllowed) == -1);
  CHECK(allow(&kernels[1], 0, kMost, 16, kMost) == cudaSuccess);
  CHECK(limit(1, 0, cudaFuncAttributeNonPortableClusterSizeAllowed) == 1);
}

}  // namespace

int main() {
  small_launches_ask_for_nothing();
  concurrent_launches_keep_their_memory();
  large_clusters_are_asked_for_where_they_are_used();
  std::puts("kernel attributes: ok");
  return 0;
}
