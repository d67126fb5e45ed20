// Convolutions with one channel in each group: a plane at a time, which stays in the cache.
#pragma once

#include <vector>

#include "convolution.h"
#include "planes.h"

namespace bnexport::cpu {

void depthwise_convolve(const Convolution& shape, const PlaneLayout& layout, const std::vector<int64_t>& offsets,
                        const float* x, const float* weight, const float* bias, float* y, Parallel& parallel,
                        Workspace& workspace);
void depthwise_input_gradient(const Convolution& shape, const PlaneLayout& layout,
                              const std::vector<GradientPhase>& phases, const float* grad, const float* weight,
                              float* grad_input, Parallel& parallel, Workspace& workspace);
void depthwise_weight_gradient(const Convolution& shape, const PlaneLayout& layout, const std::vector<int64_t>& offsets,
                               const float* grad, const float* x, float* grad_weight, Parallel& parallel,
                               Workspace& workspace);

}  // namespace bnexport::cpu
