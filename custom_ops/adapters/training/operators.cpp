#include "operators.h"

#include "../../schema/training.h"
#include "../training_library.h"

namespace bnexport::adapters {

namespace {

// In the order of the schema.
constexpr MakeKernel* kMakers[schema::kTrainingOperatorCount] = {
    make_conv,          make_conv_input_grad, make_conv_weight_grad, make_relu_grad,
    make_max_pool_grad, make_adam_update,     make_sgd_update};

}  // namespace

const TrainingKernels& training_kernels() {
  static constexpr TrainingKernels kernels = {
      [](size_t index, ort::Api api, const ort::KernelInfo* info, void** kernel) {
        return create_kernel(api, info, schema::kTrainingOperators[index], BNEXPORT_FLOAT32, kMakers[index], kernel);
      },
      compute_kernel, destroy_kernel};
  return kernels;
}

}  // namespace bnexport::adapters
