#ifndef BNEXPORT_ADAPTERS_TRAINING_OPTIMIZER_H
#define BNEXPORT_ADAPTERS_TRAINING_OPTIMIZER_H

#include "../../kernels/cpu/training/optimizer.h"
#include "tensors.h"

namespace bnexport::adapters {

class AdamUpdateKernel final : public TrainingKernel {
 public:
  AdamUpdateKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);
  void compute(ort::KernelContext* context) const override;

 private:
  cpu::AdamUpdate constants_{};
};

class SgdUpdateKernel final : public TrainingKernel {
 public:
  SgdUpdateKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);
  void compute(ort::KernelContext* context) const override;

 private:
  cpu::SgdUpdate constants_{};
};

}  // namespace bnexport::adapters

#endif  // BNEXPORT_ADAPTERS_TRAINING_OPTIMIZER_H
