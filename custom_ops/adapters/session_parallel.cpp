#include "session_parallel.h"

#include <thread>

#include "node.h"

namespace bnexport::adapters {

namespace {

struct Call {
  cpu::Parallel::Task task;
  void* context;
  const int64_t number;
  std::atomic<int64_t> threads{0};
};

// Numbers of calls are never used again, unlike their addresses.
std::atomic<int64_t> calls{0};
thread_local int64_t last_call = 0;

}  // namespace

int64_t ThreadCount::get() const {
  static const int64_t cores = std::thread::hardware_concurrency() > 0 ? std::thread::hardware_concurrency() : 1;
  const int64_t most = most_.load(std::memory_order_relaxed);
  return most > 0 ? most : cores;
}

void ThreadCount::saw(int64_t threads) {
  int64_t most = most_.load(std::memory_order_relaxed);
  while (threads > most && !most_.compare_exchange_weak(most, threads, std::memory_order_relaxed)) {
  }
}

void SessionParallel::run(int64_t count, Task task, void* context) {
  Call call{task, context, calls.fetch_add(1, std::memory_order_relaxed) + 1};
  check(api_, ort::ParallelFor::call(
                  api_, context_,
                  [](void* data, size_t index) {
                    auto* const c = static_cast<Call*>(data);
                    if (last_call != c->number) {
                      last_call = c->number;
                      c->threads.fetch_add(1, std::memory_order_relaxed);
                    }
                    c->task(c->context, static_cast<int64_t>(index));
                  },
                  static_cast<size_t>(count), 0, &call));
  threads_.saw(call.threads.load(std::memory_order_relaxed));
}

}  // namespace bnexport::adapters
