// The two operators as ONNX Runtime calls them.
#ifndef BNEXPORT_ADAPTERS_KERNELS_H
#define BNEXPORT_ADAPTERS_KERNELS_H

#include <memory>

#include "../comm/group.h"
#include "node.h"

namespace bnexport::adapters {

class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, int32_t dtype)
      : api_(api), op_(op), dtype_(dtype), attributes_(read_attributes(api, info, op)) {}
  virtual ~Kernel() = default;
  virtual void compute(ort::KernelContext* context) const = 0;
  ort::Api api() const { return api_; }

 protected:
  int32_t stats_dtype() const { return dtype_ == BNEXPORT_FLOAT64 ? BNEXPORT_FLOAT64 : BNEXPORT_FLOAT32; }
  // The registered group, its size checked. Looked up at every run: registering may come after the
  // session is built.
  std::shared_ptr<const comm::Group> group() const;
  std::string wrong_size(int64_t registered) const;
  comm::Header header(bool backward, int64_t channels) const;

  ort::Api api_;
  const schema::Operator& op_;
  int32_t dtype_;
  Attributes attributes_;
};

class ForwardKernel final : public Kernel {
 public:
  using Kernel::Kernel;
  void compute(ort::KernelContext* context) const override;
};

class BackwardKernel final : public Kernel {
 public:
  using Kernel::Kernel;
  void compute(ort::KernelContext* context) const override;
};

}  // namespace bnexport::adapters

#endif  // BNEXPORT_ADAPTERS_KERNELS_H
