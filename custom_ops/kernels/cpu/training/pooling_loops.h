// The inner loop of pooling.h. Compiled once per instruction set; see ../native.h.
//
// Kernel positions are the outer loop and neighbouring windows the inner one, which compilers turn into
// vectors; padding only shortens the range of windows that a position belongs to.
#pragma once

#include "../native.h"
#include "pooling.h"

namespace bnexport::cpu {
namespace {

constexpr int64_t kWindows = 128;  // taken together: their maxima stay in the first level of cache

// The maxima so far of neighbouring windows, and where in the plane they are; -1: nowhere yet.
struct Maxima {
  float value[kWindows];
  int32_t place[kWindows];
};

// Windows [first, last), `offset` the index in the plane of what window 0 sees in this kernel position.
template <int64_t known_stride>
BNEXPORT_INLINE void compare(Maxima& maxima, const float* x, int64_t offset, int64_t stride, int64_t first,
                             int64_t last) {
  const int64_t step = known_stride != 0 ? known_stride : stride;
  for (int64_t i = first; i < last; ++i) {
    const float value = x[offset + i * step], largest = maxima.value[i];
    const int32_t place = maxima.place[i];
    const bool takes = (value > largest) | (value != value) | (place < 0);
    maxima.value[i] = takes ? value : largest;
    maxima.place[i] = takes ? static_cast<int32_t>(offset + i * step) : place;
  }
}

void max_pool_gradient_loop(const MaxPool& pool, const float* grad, const float* x, float* grad_input) {
  const auto [H, W] = pool.in;
  const int64_t stride = pool.stride.w;
  for (int64_t i = 0; i < H * W; ++i) grad_input[i] = 0;
  Maxima maxima;
  for (int64_t row = 0; row < pool.out.h; ++row) {
    for (int64_t start = 0; start < pool.out.w; start += kWindows) {
      const int64_t windows = pool.out.w - start < kWindows ? pool.out.w - start : kWindows;
      for (int64_t i = 0; i < windows; ++i) maxima.place[i] = -1, maxima.value[i] = 0;
      for (int64_t ky = 0; ky < pool.kernel.h; ++ky) {
        const int64_t y = row * pool.stride.h - pool.padding.h + ky * pool.dilation.h;
        if (y < 0 || y >= H) continue;
        for (int64_t kx = 0; kx < pool.kernel.w; ++kx) {
          // Window i sees column i * stride + left, which lies within [0, W) for i in [first, last).
          const int64_t left = start * stride - pool.padding.w + kx * pool.dilation.w;
          if (left >= W) continue;
          const int64_t first = left < 0 ? (-left + stride - 1) / stride : 0, end = (W - 1 - left) / stride + 1;
          const int64_t last = end < windows ? end : windows;
          const int64_t offset = y * W + left;
          if (stride == 1) {
            compare<1>(maxima, x, offset, stride, first, last);
          } else if (stride == 2) {
            compare<2>(maxima, x, offset, stride, first, last);
          } else {
            compare<0>(maxima, x, offset, stride, first, last);
          }
        }
      }
      const float* const g = grad + row * pool.out.w + start;
      for (int64_t i = 0; i < windows; ++i) {
        if (maxima.place[i] >= 0) grad_input[maxima.place[i]] += g[i];
      }
    }
  }
}

}  // namespace
}  // namespace bnexport::cpu
