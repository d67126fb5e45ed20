// The threads behind the C API: those of the OpenMP runtime that the program lends, else the caller's alone.
#pragma once

#include "parallel.h"

namespace bnexport::cpu {

// Up to `threads` threads, the caller's included.
class OpenMpThreads final : public Parallel {
 public:
  explicit OpenMpThreads(int64_t threads) : threads_(threads) {}
  void run(int64_t count, Task task, void* context) override;
  int64_t width() const override { return threads_; }

 private:
  int64_t threads_;
};

// The entry point that compilers call for `#pragma omp parallel`: runs body(data) in up to `threads`
// threads and returns when all have.
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// Lends the program's OpenMP runtime to the C API, or takes it back (nullptr). Threads of the library's own would
// compete with it: its idle threads spin for a while and keep the cores.
void lend_openmp(OpenMpParallel parallel);

}  // namespace bnexport::cpu
