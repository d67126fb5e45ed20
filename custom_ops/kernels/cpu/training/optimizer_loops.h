// The inner loops of optimizer.h. Compiled once per instruction set; see ../native.h.
#pragma once

#include "../native.h"
#include "optimizer.h"

namespace bnexport::cpu {
namespace {

// Whole vectors, then the elements that are left; both through the same arithmetic.
struct Whole {
  BNEXPORT_INLINE NativeF load(const float* from) const { return load_bytes<NativeF>(from); }
  template <bool stream>
  BNEXPORT_INLINE void store(float* to, NativeF value) const {
    store_bytes<stream>(to, value);
  }
};
struct Part {
  int64_t count;
  BNEXPORT_INLINE NativeF load(const float* from) const { return load_part(from, count); }
  template <bool stream>
  BNEXPORT_INLINE void store(float* to, NativeF value) const {
    store_part(to, value, count);
  }
};

template <bool amsgrad, bool stream, class Access>
BNEXPORT_INLINE void adam_at(const AdamUpdate& k, int64_t i, const Access& access) {
  const NativeF p = access.load(k.parameter + i), m = access.load(k.exp_avg + i), v = access.load(k.exp_avg_sq + i);
  NativeF g = access.load(k.grad + i);
  if (k.weight_decay != 0) g += k.weight_decay * p;
  const NativeF new_m = m + (g - m) * k.one_minus_beta1;
  const NativeF new_v = v * k.beta2 + g * g * k.one_minus_beta2;
  NativeF largest = new_v;
  if constexpr (amsgrad) {
    const NativeF old = access.load(k.max_exp_avg_sq + i);
    // NaN stays, whichever of the two it is.
    largest = old <= new_v ? new_v : old;
    largest = new_v != new_v ? new_v : largest;
    access.template store<stream>(k.new_max_exp_avg_sq + i, largest);
  }
  const NativeF denominator = square_root(largest) / k.bias_correction2_sqrt + k.eps;
  access.template store<stream>(k.new_exp_avg + i, new_m);
  access.template store<stream>(k.new_exp_avg_sq + i, new_v);
  access.template store<stream>(k.new_parameter + i, p * k.keep - new_m / denominator * k.step_size);
}

template <bool has_momentum, bool stream, class Access>
BNEXPORT_INLINE void sgd_at(const SgdUpdate& k, int64_t i, const Access& access) {
  const NativeF p = access.load(k.parameter + i);
  NativeF g = access.load(k.grad + i);
  if (k.weight_decay != 0) g += k.weight_decay * p;
  if constexpr (has_momentum) {
    const NativeF b = access.load(k.momentum_buffer + i) * k.momentum + g * k.share;
    access.template store<stream>(k.new_momentum_buffer + i, b);
    g = k.nesterov ? g + b * k.momentum : b;
  }
  access.template store<stream>(k.new_parameter + i, p - g * k.lr);
}

// A copy of the numbers: stores through float pointers could else change them in the compiler's eyes.
template <bool amsgrad, bool stream>
void adam_of(AdamUpdate adam, int64_t first, int64_t count) {
  int64_t i = first;
  for (; i + kFloats <= first + count; i += kFloats) adam_at<amsgrad, stream>(adam, i, Whole{});
  if (i < first + count) adam_at<amsgrad, false>(adam, i, Part{first + count - i});
  if (stream) stream_fence();
}

template <bool has_momentum, bool stream>
void sgd_of(SgdUpdate sgd, int64_t first, int64_t count) {
  int64_t i = first;
  for (; i + kFloats <= first + count; i += kFloats) sgd_at<has_momentum, stream>(sgd, i, Whole{});
  if (i < first + count) sgd_at<has_momentum, false>(sgd, i, Part{first + count - i});
  if (stream) stream_fence();
}

void adam_loop(const AdamUpdate& k, int64_t first, int64_t count, bool stream) {
  const auto run = k.max_exp_avg_sq != nullptr ? (stream ? adam_of<true, true> : adam_of<true, false>)
                                               : (stream ? adam_of<false, true> : adam_of<false, false>);
  run(k, first, count);
}

void sgd_loop(const SgdUpdate& k, int64_t first, int64_t count, bool stream) {
  const auto run = k.momentum_buffer != nullptr ? (stream ? sgd_of<true, true> : sgd_of<true, false>)
                                                : (stream ? sgd_of<false, true> : sgd_of<false, false>);
  run(k, first, count);
}

}  // namespace
}  // namespace bnexport::cpu
