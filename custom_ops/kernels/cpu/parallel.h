// Interface for threads: the caller provides them (ONNX Runtime's pool, or the pool of the C API).
#pragma once

#include <cstdint>

namespace bnexport::cpu {

class Parallel {
 public:
  using Task = void (*)(void* context, int64_t index);

  virtual ~Parallel() = default;
  // Calls task(context, i) for each i in [0, count), in any order and from any thread, and returns
  // when all have returned. Tasks must not throw.
  virtual void run(int64_t count, Task task, void* context) = 0;
  // About how many tasks can run at a time; a hint for the split of the work, never for its result.
  virtual int64_t width() const = 0;
};

template <class Body>
void parallel_for(Parallel& parallel, int64_t count, const Body& body) {
  if (count == 1) {
    body(0);
  } else if (count > 1) {
    parallel.run(
        count, [](void* context, int64_t index) { (*static_cast<const Body*>(context))(index); },
        const_cast<Body*>(&body));
  }
}

}  // namespace bnexport::cpu
