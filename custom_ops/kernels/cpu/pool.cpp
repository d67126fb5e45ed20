#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace bnexport::cpu {

namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// A worker looks for new work this often before it sleeps: about 20 microseconds, the time between
// two kernels of a layer, and far less than what would take a core from anyone else.
constexpr int kSpins = 500;

class Pool {
 public:
  // False when the pool is in use.
  bool run(int64_t count, int64_t threads, Parallel::Task task, void* context) {
    std::unique_lock<std::mutex> use(use_, std::try_to_lock);
    if (!use.owns_lock()) return false;
    const int64_t helpers = (threads < count ? threads : count) - 1;
    while (workers_ < helpers) {
      try {
        std::thread(&Pool::work, this).detach();
      } catch (const std::exception&) {
        break;  // no more threads to be had: those that exist, and the caller, do it
      }
      ++workers_;
    }
    task_ = task;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    {
      const std::scoped_lock lock(mutex_);
      tickets_ = helpers < workers_ ? helpers : workers_;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    drain();
    // Workers that have not started by now are no longer needed; the others finish their task.
    std::unique_lock<std::mutex> lock(mutex_);
    tickets_ = 0;
    for (int i = 0; i < kSpins && running_ > 0; ++i) {
      lock.unlock();
      relax();
      lock.lock();
    }
    done_.wait(lock, [&] { return running_ == 0; });
    return true;
  }

 private:
  void drain() {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) task_(context_, i);
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) relax();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        if (tickets_ == 0) continue;
        --tickets_;
        ++running_;
      }
      drain();
      const std::scoped_lock lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex use_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> next_{0};
  int64_t workers_ = 0, tickets_ = 0, running_ = 0, count_ = 0;
  Parallel::Task task_ = nullptr;
  void* context_ = nullptr;
};

// Never destroyed: workers may outlive main.
std::atomic<Pool*> shared{nullptr};
std::atomic<OpenMpParallel> openmp{nullptr};
std::mutex creation;

// A forked child has none of its parent's threads, so it forgets the pool; and an OpenMP runtime that had
// threads waits in the child for ever for those it no longer has, so it forgets that one, too.
void handle_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { creation.lock(); }, [] { creation.unlock(); },
                   [] {
                     shared.store(nullptr);
                     openmp.store(nullptr);
                     creation.unlock();
                   });
  });
}

Pool& pool() {
  Pool* current = shared.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  const std::scoped_lock lock(creation);
  if (shared.load() == nullptr) {
    handle_forks();
    shared.store(new Pool(), std::memory_order_release);
  }
  return *shared.load();
}

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
  handle_forks();
  openmp.store(parallel);
}

void PoolParallel::run(int64_t count, Task task, void* context) {
  const OpenMpParallel lent = openmp.load(std::memory_order_relaxed);
  if (lent != nullptr && threads_ > 1 && count > 1) {
    Region region{{0}, count, task, context};
    lent(Region::drain, &region, static_cast<unsigned>(threads_ < count ? threads_ : count), 0);
    return;
  }
  if (threads_ > 1 && count > 1 && pool().run(count, threads_, task, context)) return;
  for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace bnexport::cpu
