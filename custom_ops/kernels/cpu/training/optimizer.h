// One update of a parameter by Adam, AdamW or SGD, float32, in one pass over memory.
//
// With parameter p, gradient g, moments m and v, all of one size:
//
//   Adam   g' = g + weight_decay p      p' = keep p
//          m  = m + (1 - beta1) (g' - m)
//          v  = beta2 v + (1 - beta2) g'^2
//          p  = p' - step_size m / (sqrt(v) / bias_correction2_sqrt + eps)
//          with a maximum of all v so far: that in place of v in the last line
//   SGD    g' = g + weight_decay p      b = momentum b + share g'
//          p  = p - lr (g' + momentum b  with nesterov, b  with momentum, else g')
//
// Outputs may be the inputs themselves.
#pragma once

#include <cstdint>

#include "../parallel.h"

namespace bnexport::cpu {

struct AdamUpdate {
  const float *parameter, *grad, *exp_avg, *exp_avg_sq;
  const float* max_exp_avg_sq;  // null without AMSGrad
  float *new_parameter, *new_exp_avg, *new_exp_avg_sq, *new_max_exp_avg_sq;
  // 1 - beta is a number of its own: in float32 the subtraction would cost five digits of 1 - 0.999.
  float one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay;
  float step_size, bias_correction2_sqrt, keep;
};

struct SgdUpdate {
  const float *parameter, *grad;
  const float* momentum_buffer;  // null without momentum
  float *new_parameter, *new_momentum_buffer;
  float momentum, weight_decay;
  bool nesterov;
  float lr, share;
};

void update(const AdamUpdate& adam, int64_t count, Parallel& parallel);
void update(const SgdUpdate& sgd, int64_t count, Parallel& parallel);

}  // namespace bnexport::cpu
