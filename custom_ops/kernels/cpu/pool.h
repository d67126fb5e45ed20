// The threads behind the C API: the program's own OpenMP threads where it lends them, else a pool that
// is started on first use, kept, and shared by all callers.
#pragma once

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

// The entry point that compilers call for `#pragma omp parallel`: runs body(data) in up to `threads`
// threads and returns when all have.
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// Lends the program's OpenMP runtime to the C API, or takes it back (nullptr). Its idle threads spin
// for a while and would keep the cores from threads of our own: on 2 cores a training forward after
// another OpenMP region took 5.4 ms with the pool, 1.5 ms without the region before it.
void lend_openmp(OpenMpParallel parallel);

}  // namespace bnexport::cpu
