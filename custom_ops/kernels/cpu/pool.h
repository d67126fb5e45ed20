// The threads behind the C API: started on first use, kept, and shared by all callers.
#ifndef BNEXPORT_KERNELS_CPU_POOL_H
#define BNEXPORT_KERNELS_CPU_POOL_H

#include "parallel.h"

namespace bnexport::cpu {

// Up to `threads` threads, the caller's included. When another thread of the program is using the
// pool at the moment, the caller does the work alone (the result has the same bits).
class PoolParallel final : public Parallel {
 public:
  explicit PoolParallel(int64_t threads) : threads_(threads) {}
  void run(int64_t count, Task task, void* context) override;
  int64_t width() const override { return threads_; }

 private:
  int64_t threads_;
};

}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_POOL_H
