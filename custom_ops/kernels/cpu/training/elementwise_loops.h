// The inner loop of elementwise.h. Compiled once per instruction set; see ../simd.h.
#ifndef BNEXPORT_KERNELS_CPU_TRAINING_ELEMENTWISE_LOOPS_H
#define BNEXPORT_KERNELS_CPU_TRAINING_ELEMENTWISE_LOOPS_H

#include "../simd.h"
#include "elementwise.h"

namespace bnexport::cpu {
namespace {

template <bool has_high>
BNEXPORT_INLINE VectorF passed(VectorF grad, VectorF x, VectorF low, VectorF high) {
  VectorF result = x <= low ? VectorF{} : grad;
  if constexpr (has_high) result = x >= high ? VectorF{} : result;
  return result;
}

template <bool has_high, bool stream>
void relu_gradient_of(const OpenRange& range, const float* grad, const float* x, float* grad_input, int64_t count) {
  const VectorF low = VectorF{} + range.low, high = VectorF{} + range.high;
  int64_t i = 0;
  for (; i + kLanes<Float32> <= count; i += kLanes<Float32>) {
    Float32::store<stream>(grad_input + i, passed<has_high>(Float32::load(grad + i), Float32::load(x + i), low, high));
  }
  const int64_t rest = count - i;
  store_part<Float32>(grad_input + i,
                      passed<has_high>(load_part<Float32>(grad + i, rest), load_part<Float32>(x + i, rest), low, high),
                      rest);
  if (stream) stream_fence();
}

void relu_gradient_loop(const OpenRange& range, const float* grad, const float* x, float* grad_input, int64_t count,
                        bool stream) {
  const auto run = range.has_high ? (stream ? relu_gradient_of<true, true> : relu_gradient_of<true, false>)
                                  : (stream ? relu_gradient_of<false, true> : relu_gradient_of<false, false>);
  run(range, grad, x, grad_input, count);
}

}  // namespace
}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_TRAINING_ELEMENTWISE_LOOPS_H
