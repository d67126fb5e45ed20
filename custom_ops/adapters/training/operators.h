// Makers of the training kernels.
#pragma once

#include "../definition.h"

namespace bnexport::adapters {

MakeKernel make_conv, make_conv_input_grad, make_conv_weight_grad, make_relu_grad, make_max_pool_grad, make_adam_update,
    make_sgd_update;

}  // namespace bnexport::adapters
