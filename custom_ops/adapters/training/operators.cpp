#include "operators.h"

#include "../../schema/training.h"
#include "../definition.h"
#include "../training_library.h"

namespace bnexport::adapters {

namespace {

// In the order of the schema.
constexpr Compute* kComputes[schema::kTrainingOperatorCount] = {
    conv, conv_input_grad, conv_weight_grad, relu_grad, max_pool_grad, adam_update, sgd_update};

class TrainingKernel final : public Kernel {
 public:
  using Kernel::Kernel;
  void compute(const Run& run) const override { kComputes[&node_.op - schema::kTrainingOperators](run); }
};

}  // namespace

const TrainingKernels& training_kernels() {
  static constexpr TrainingKernels kernels = {
      [](size_t index, ort::Api api, const ort::KernelInfo* info, void** kernel) {
        return create_kernel(api, info, schema::kTrainingOperators[index], BNEXPORT_FLOAT32, make<TrainingKernel>,
                             kernel);
      },
      compute_kernel, destroy_kernel};
  return kernels;
}

}  // namespace bnexport::adapters
