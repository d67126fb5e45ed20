// ONNX Runtime kernels of batch norm and its gradient.
#pragma once

#include <memory>

#include "../../comm/group.h"
#include "binding.h"

namespace bnexport::adapters {

class BatchNormKernel : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  // The registered group, its size checked. Looked up at every run: registering may come after the
  // session is built.
  std::shared_ptr<const comm::Group> group() const;
  void require_size(int64_t registered) const;
  template <class Params>
  comm::Header header(const Params& params) const;
};

class ForwardKernel final : public BatchNormKernel {
 public:
  using BatchNormKernel::BatchNormKernel;
  void compute(const Run& run) const override;
};

class BackwardKernel final : public BatchNormKernel {
 public:
  using BatchNormKernel::BatchNormKernel;
  void compute(const Run& run) const override;
};

template <class Params>
comm::Header BatchNormKernel::header(const Params& params) const {
  comm::Header header;
  header.channels = params.C;
  header.dtype = params.dtype;
  header.stats_dtype = params.stats_dtype;
  header.stats_mode = params.stats_mode;
  if constexpr (std::is_same_v<Params, bnexport_backward>) {
    header.backward = true;
    header.grad_reduction = params.grad_reduction;
  }
  header.training = params.training;
  header.group_size = params.group_size;
  header.node = node_.name;
  return header;
}

}  // namespace bnexport::adapters
