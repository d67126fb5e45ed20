#include "openmp.h"

#include <pthread.h>

#include <atomic>

namespace bnexport::cpu {

namespace {

std::atomic<OpenMpParallel> openmp{nullptr};

struct Region {
  std::atomic<int64_t> next{0};
  int64_t count;
  Parallel::Task task;
  void* context;

  static void drain(void* data) {
    auto& region = *static_cast<Region*>(data);
    for (int64_t i = region.next++; i < region.count; i = region.next++) region.task(region.context, i);
  }
};

}  // namespace

void lend_openmp(OpenMpParallel parallel) {
  // A forked child has none of its parent's threads, for which an OpenMP runtime that had any would wait for ever.
  static const int forgets = pthread_atfork(nullptr, nullptr, [] { openmp.store(nullptr); });
  openmp.store(forgets == 0 ? parallel : nullptr);
}

void OpenMpThreads::run(int64_t count, Task task, void* context) {
  Region region{{0}, count, task, context};
  const OpenMpParallel lent = openmp.load(std::memory_order_relaxed);
  if (lent != nullptr && threads_ > 1 && count > 1) {
    lent(Region::drain, &region, static_cast<unsigned>(threads_ < count ? threads_ : count), 0);
  } else {
    Region::drain(&region);
  }
}

}  // namespace bnexport::cpu
