#include "../../kernels/cpu/training/elementwise.h"
#include "operators.h"
#include "tensors.h"

namespace bnexport::adapters {

namespace {

class ReluGradKernel final : public Kernel {
 public:
  explicit ReluGradKernel(const AttributeReader& read) : Kernel(read) {
    const std::optional<float> high = read.optional_number("high");
    range_ = {read.number("low"), high.value_or(0), high.has_value()};
  }

  void compute(ort::KernelContext* context) const override {
    const Run run(api_, context, op_, where_);
    const Tensor grad = run.input(0), x = run.input(1);
    require_shape(run, op_, 0, grad, x.shape, "that of 'input'");
    float* const grad_input = output_values(run, op_, 0, x.shape);
    SessionParallel parallel(api_, context, threads_);
    cpu::relu_gradient(range_, values(grad), values(x), grad_input, count_of(x.shape), parallel);
  }

 private:
  cpu::OpenRange range_{};
};

}  // namespace

Kernel* make_relu_grad(const AttributeReader& read, int32_t) { return new ReluGradKernel(read); }

}  // namespace bnexport::adapters
