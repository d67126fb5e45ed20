// Convolutions of a training step, float32: forward and both gradients.
//
// With x the input (N, C, D, H, W), w the weight (O, C / groups, Kd, Kh, Kw) and g the gradient by the output
// (N, O, Do, Ho, Wo), all contiguous:
//
//   y[n, o, i]  = b[o] + sum_c,k  w[o, c, k] x[n, c, s i + d k - p]
//   dx[n, c, j] = sum over o, k, i with s i + d k - p = j of  w[o, c, k] g[n, o, i]
//   dw[o, c, k] = sum_n,i  g[n, o, i] x[n, c, s i + d k - p]
//
// Sums run in one order whatever the number of threads, so a result has the same bits for all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../parallel.h"

namespace bnexport::cpu {

// One for height, one for width; one-dimensional convolutions have height 1.
struct Pair {
  int64_t h, w;
};

// The third dimension, in front of the other two.
struct Depth {
  int64_t in = 1, out = 1, kernel = 1, stride = 1, dilation = 1, padding = 0;
};

struct Convolution {
  int64_t batch, channels, outputs, groups;
  Pair in, out;  // extents of x and y
  Pair kernel, stride, dilation;
  Pair padding;  // before the first row and column; what is missing at the end is zero, too
  Depth depth;
};

// Memory for one call, from whoever has it at hand (ONNX Runtime's arena). What is allocated lives as
// long as the object. Throws std::bad_alloc.
class Workspace {
 public:
  virtual ~Workspace() = default;
  virtual void* allocate(size_t bytes) = 0;
};

// Whether input_gradient serves the shape: a stride and a dilation above 1 do not come together.
bool has_input_gradient(const Convolution& shape);

// bias: outputs values, or null.
void convolve(const Convolution& shape, const float* x, const float* weight, const float* bias, float* y,
              Parallel& parallel, Workspace& workspace);
void input_gradient(const Convolution& shape, const float* grad, const float* weight, float* grad_input,
                    Parallel& parallel, Workspace& workspace);
void weight_gradient(const Convolution& shape, const float* grad, const float* x, float* grad_weight,
                     Parallel& parallel, Workspace& workspace);

}  // namespace bnexport::cpu
