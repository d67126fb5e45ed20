#include "pooling.h"

#include "../../common/math.h"
#include "../processor.h"
#include "table.h"

namespace bnexport::cpu {

void max_pool_gradient(const MaxPool& pool, const float* grad, const float* x, float* grad_input, Parallel& parallel) {
  const int64_t in = pool.in.h * pool.in.w, out = pool.out.h * pool.out.w;
  if (pool.planes == 0 || in == 0) return;
  const auto run = training_table().max_pool_gradient;
  // A window's value is compared once for each of its positions: a plane costs more than its size.
  const int64_t planes = in < kSerial ? kSerial / in : 1;
  parallel_for(parallel, ceil_div(pool.planes, planes), [&](int64_t task) {
    const int64_t last = (task + 1) * planes < pool.planes ? (task + 1) * planes : pool.planes;
    for (int64_t plane = task * planes; plane < last; ++plane) {
      run(pool, grad + plane * out, x + plane * in, grad_input + plane * in);
    }
  });
}

}  // namespace bnexport::cpu
