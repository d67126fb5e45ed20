#ifndef BNEXPORT_ADAPTERS_TRAINING_ELEMENTWISE_H
#define BNEXPORT_ADAPTERS_TRAINING_ELEMENTWISE_H

#include "../../kernels/cpu/training/elementwise.h"
#include "tensors.h"

namespace bnexport::adapters {

class ReluGradKernel final : public TrainingKernel {
 public:
  ReluGradKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);
  void compute(ort::KernelContext* context) const override;

 private:
  cpu::OpenRange range_{};
};

}  // namespace bnexport::adapters

#endif  // BNEXPORT_ADAPTERS_TRAINING_ELEMENTWISE_H
