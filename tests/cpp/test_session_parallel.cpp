// A node plans for the threads that its session turns out to have, not for the cores of the machine.
#include "../../custom_ops/adapters/session_parallel.h"

#include <thread>
#include <vector>

#include "check.h"

using namespace bnexport;

namespace {

int64_t session_threads = 1;

// ONNX Runtime's KernelContext_ParallelFor with as many threads as a session has.
ort::Status* parallel_for(const ort::KernelContext*, void (*task)(void*, size_t), size_t count, size_t, void* data) {
  std::vector<std::thread> threads;
  const auto all = static_cast<size_t>(session_threads);
  for (size_t t = 0; t < all && t < count; ++t) {
    threads.emplace_back([=] {
      for (size_t i = t; i < count; i += all) task(data, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return nullptr;
}

}  // namespace

int main() {
  void* slots[275] = {};
  slots[274] = reinterpret_cast<void*>(parallel_for);
  const ort::Api api = slots;
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  adapters::ThreadCount threads;
  const auto run = [&](int64_t count) {
    std::vector<int> done(static_cast<size_t>(count));
    adapters::SessionParallel parallel(api, nullptr, threads);
    const int64_t planned = parallel.width();
    cpu::parallel_for(parallel, count, [&](int64_t i) { ++done[static_cast<size_t>(i)]; });
    for (const int times : done) CHECK(times == 1);
    CHECK(parallel.width() == planned);  // one plan for the whole run
    return planned;
  };
  CHECK(run(8) == (cores > 0 ? cores : 1));
  CHECK(run(8) == 1);  // the session of the first run has one thread
  session_threads = 4;
  CHECK(run(2) == 1);
  CHECK(run(4) == 2);  // two of them have taken a task so far
  CHECK(run(1) == 4);  // a single task asks for no thread and tells nothing
  CHECK(run(3) == 4);
  CHECK(run(8) == 4);
  std::printf("session_parallel: ok\n");
  return 0;
}
