// The operators of a training step: one run of a node each.
#pragma once

#include "../node.h"

namespace bnexport::adapters {

using Compute = void(const Run& run);
Compute conv, conv_input_grad, conv_weight_grad, relu_grad, max_pool_grad, adam_update, sgd_update;

}  // namespace bnexport::adapters
