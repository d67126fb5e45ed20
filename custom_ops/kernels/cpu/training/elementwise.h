// The gradient of ReLU and its bounded relatives, float32.
#pragma once

#include <cstdint>

#include "../parallel.h"

namespace bnexport::cpu {

// Where the gradient passes: low < x, and x < high when there is an upper end. NaN passes, as in torch.
struct OpenRange {
  float low, high;
  bool has_high;
};

// grad_input[i] = grad[i] where x[i] lies within the range, else 0. grad_input may be grad.
void relu_gradient(const OpenRange& range, const float* grad, const float* x, float* grad_input, int64_t count,
                   Parallel& parallel);

}  // namespace bnexport::cpu
