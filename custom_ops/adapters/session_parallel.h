// Threads for the kernels: ONNX Runtime's own, those of the session that runs the node.
#pragma once

#include <atomic>
#include <cstdint>

#include "../abi/ort_abi.h"
#include "../kernels/cpu/parallel.h"

namespace bnexport::adapters {

// How many threads a session has, as far as a node has seen. The C API tells no kernel; so each run counts the
// threads that took a task, and the next one plans for the most that were seen. Plans leave two tasks for each
// thread, so that a count that is too low doubles with each run; one that is too high is that of the first
// run, which plans for all cores.
class ThreadCount {
 public:
  int64_t get() const;
  void saw(int64_t threads);

 private:
  std::atomic<int64_t> most_{0};
};

class SessionParallel final : public cpu::Parallel {
 public:
  SessionParallel(ort::Api api, const ort::KernelContext* context, ThreadCount& threads)
      : api_(api), context_(context), threads_(threads), width_(threads.get()) {}
  void run(int64_t count, Task task, void* context) override;
  int64_t width() const override { return width_; }

 private:
  ort::Api api_;
  const ort::KernelContext* context_;
  ThreadCount& threads_;
  const int64_t width_;  // one plan for the whole run of a node
};

}  // namespace bnexport::adapters
