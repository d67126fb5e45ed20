// The inner loop of elementwise.h. Compiled once per instruction set; see ../native.h.
#pragma once

#include "../native.h"
#include "elementwise.h"

namespace bnexport::cpu {
namespace {

template <bool has_high>
BNEXPORT_INLINE NativeF passed(NativeF grad, NativeF x, NativeF low, NativeF high) {
  NativeF result = x <= low ? NativeF{} : grad;
  if constexpr (has_high) result = x >= high ? NativeF{} : result;
  return result;
}

template <bool has_high, bool stream>
void relu_gradient_of(const OpenRange& range, const float* grad, const float* x, float* grad_input, int64_t count) {
  const NativeF low = NativeF{} + range.low, high = NativeF{} + range.high;
  const auto at = [&](int64_t i) {
    return passed<has_high>(load_bytes<NativeF>(grad + i), load_bytes<NativeF>(x + i), low, high);
  };
  int64_t i = 0;
  for (; i + 4 * kFloats <= count; i += 4 * kFloats) {
    for (int64_t part = 0; part < 4; ++part) {
      store_bytes<stream>(grad_input + i + part * kFloats, at(i + part * kFloats));
    }
  }
  for (; i + kFloats <= count; i += kFloats) store_bytes<stream>(grad_input + i, at(i));
  const int64_t rest = count - i;
  if (rest > 0) {
    store_part(grad_input + i, passed<has_high>(load_part(grad + i, rest), load_part(x + i, rest), low, high), rest);
  }
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
