// The gradient of two-dimensional max pooling, float32.
//
// A window's gradient goes to its maximum: the first of equal ones in row-major order, the last NaN if
// there is one, as in torch. The maximum is searched again, so that a forward need not keep where it was.
#pragma once

#include <cstdint>

#include "../parallel.h"
#include "convolution/convolution.h"

namespace bnexport::cpu {

struct MaxPool {
  int64_t planes;  // batch times channels
  Pair in, out;    // extents of x and of the gradient; in.h * in.w fits 31 bits
  Pair kernel, stride, padding, dilation;
};

void max_pool_gradient(const MaxPool& pool, const float* grad, const float* x, float* grad_input, Parallel& parallel);

}  // namespace bnexport::cpu
