#ifndef BNEXPORT_ADAPTERS_TRAINING_POOLING_H
#define BNEXPORT_ADAPTERS_TRAINING_POOLING_H

#include "../../kernels/cpu/training/pooling.h"
#include "tensors.h"

namespace bnexport::adapters {

class MaxPoolGradKernel final : public TrainingKernel {
 public:
  MaxPoolGradKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);
  void compute(ort::KernelContext* context) const override;

 private:
  cpu::Pair kernel_{}, stride_{}, padding_{}, dilation_{};
};

}  // namespace bnexport::adapters

#endif  // BNEXPORT_ADAPTERS_TRAINING_POOLING_H
