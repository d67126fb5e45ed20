// ONNX Runtime kernels of batch norm and its gradient.
#pragma once

#include <memory>

#include "../../comm/group.h"
#include "binding.h"

namespace bnexport::adapters {

class BatchNormKernel : public Kernel {
 public:
  BatchNormKernel(const AttributeReader& read, int32_t dtype)
      : Kernel(read), dtype_(dtype), attributes_(read_attributes(read)) {}

 protected:
  int32_t stats_dtype() const { return dtype_ == BNEXPORT_FLOAT64 ? BNEXPORT_FLOAT64 : BNEXPORT_FLOAT32; }
  // The registered group, its size checked. Looked up at every run: registering may come after the
  // session is built.
  std::shared_ptr<const comm::Group> group() const;
  std::string wrong_size(int64_t registered) const;
  comm::Header header(bool backward, int64_t channels) const;

  int32_t dtype_;
  Attributes attributes_;
};

class ForwardKernel final : public BatchNormKernel {
 public:
  using BatchNormKernel::BatchNormKernel;
  void compute(ort::KernelContext* context) const override;
};

class BackwardKernel final : public BatchNormKernel {
 public:
  using BatchNormKernel::BatchNormKernel;
  void compute(ort::KernelContext* context) const override;
};

}  // namespace bnexport::adapters
