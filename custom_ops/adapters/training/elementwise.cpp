#include "elementwise.h"

namespace bnexport::adapters {

ReluGradKernel::ReluGradKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op)
    : TrainingKernel(api, op, read.where()) {
  const std::optional<float> high = read.optional_number("high");
  range_ = {read.number("low"), high.value_or(0), high.has_value()};
}

void ReluGradKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, where_);
  const Tensor grad = run.input(0), x = run.input(1);
  require_shape(run, op_, 0, grad, x.shape, "that of 'input'");
  float* const grad_input = output_values(run, op_, 0, x.shape);
  SessionParallel parallel(api_, context, threads_);
  cpu::relu_gradient(range_, values(grad), values(x), grad_input, count_of(x.shape), parallel);
}

}  // namespace bnexport::adapters
