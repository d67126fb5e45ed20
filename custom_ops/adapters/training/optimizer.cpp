#include "../../kernels/cpu/training/optimizer.h"
#include "operators.h"
#include "tensors.h"

namespace bnexport::adapters {

namespace {

// One of the tensors that have the parameter's shape; null when it is absent.
const float* like_parameter(const Run& run, const schema::Operator& op, size_t index,
                            const std::vector<int64_t>& shape) {
  const Tensor tensor = run.input(index);
  if (tensor.present) require_shape(run, op, index, tensor, shape, "that of 'parameter'");
  return values(tensor);
}

// A tensor that is kept from step to step goes in and comes out, or is absent on both sides.
void require_pair(const Run& run, const schema::Operator& op, size_t input, size_t output, const float* in,
                  const float* out) {
  if ((in == nullptr) == (out == nullptr)) return;
  const char *present = in != nullptr ? op.inputs[input].name : op.outputs[output].name,
             *absent = in != nullptr ? op.outputs[output].name : op.inputs[input].name;
  run.fail(std::string("'") + present + "' is used but '" + absent + "' is missing, expected both or neither");
}

class AdamUpdateKernel final : public Kernel {
 public:
  explicit AdamUpdateKernel(const AttributeReader& read) : Kernel(read) {
    constants_.one_minus_beta1 = read.number("one_minus_beta1");
    constants_.beta2 = read.number("beta2");
    constants_.one_minus_beta2 = read.number("one_minus_beta2");
    constants_.eps = read.number("eps");
    constants_.weight_decay = read.number("weight_decay");
  }

  void compute(ort::KernelContext* context) const override {
    enum Input : size_t { kParameter, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kStepSize, kBiasCorrection, kKeep };
    const Run run(api_, context, op_, where_);
    const Tensor parameter = run.input(kParameter);
    cpu::AdamUpdate adam = constants_;
    adam.parameter = values(parameter);
    adam.grad = like_parameter(run, op_, kGrad, parameter.shape);
    adam.exp_avg = like_parameter(run, op_, kExpAvg, parameter.shape);
    adam.exp_avg_sq = like_parameter(run, op_, kExpAvgSq, parameter.shape);
    adam.max_exp_avg_sq = like_parameter(run, op_, kMaxExpAvgSq, parameter.shape);
    adam.step_size = scalar(run, op_, kStepSize);
    adam.bias_correction2_sqrt = scalar(run, op_, kBiasCorrection);
    adam.keep = run.input(kKeep).present ? scalar(run, op_, kKeep) : 1.0F;
    adam.new_parameter = output_values(run, op_, 0, parameter.shape);
    adam.new_exp_avg = output_values(run, op_, 1, parameter.shape);
    adam.new_exp_avg_sq = output_values(run, op_, 2, parameter.shape);
    adam.new_max_exp_avg_sq = output_values(run, op_, 3, parameter.shape);
    require_pair(run, op_, kMaxExpAvgSq, 3, adam.max_exp_avg_sq, adam.new_max_exp_avg_sq);
    SessionParallel parallel(api_, context, threads_);
    cpu::update(adam, count_of(parameter.shape), parallel);
  }

 private:
  cpu::AdamUpdate constants_{};
};

class SgdUpdateKernel final : public Kernel {
 public:
  explicit SgdUpdateKernel(const AttributeReader& read) : Kernel(read) {
    constants_.momentum = read.number("momentum");
    constants_.weight_decay = read.number("weight_decay");
    constants_.nesterov = read.integer("nesterov", 0, 1) == 1;
  }

  void compute(ort::KernelContext* context) const override {
    enum Input : size_t { kParameter, kGrad, kMomentumBuffer, kLr, kShare };
    const Run run(api_, context, op_, where_);
    const Tensor parameter = run.input(kParameter);
    cpu::SgdUpdate sgd = constants_;
    sgd.parameter = values(parameter);
    sgd.grad = like_parameter(run, op_, kGrad, parameter.shape);
    sgd.momentum_buffer = like_parameter(run, op_, kMomentumBuffer, parameter.shape);
    sgd.lr = scalar(run, op_, kLr);
    sgd.share = run.input(kShare).present ? scalar(run, op_, kShare) : 1.0F;
    sgd.new_parameter = output_values(run, op_, 0, parameter.shape);
    sgd.new_momentum_buffer = output_values(run, op_, 1, parameter.shape);
    require_pair(run, op_, kMomentumBuffer, 1, sgd.momentum_buffer, sgd.new_momentum_buffer);
    SessionParallel parallel(api_, context, threads_);
    cpu::update(sgd, count_of(parameter.shape), parallel);
  }

 private:
  cpu::SgdUpdate constants_{};
};

}  // namespace

Kernel* make_adam_update(const AttributeReader& read, int32_t) { return new AdamUpdateKernel(read); }
Kernel* make_sgd_update(const AttributeReader& read, int32_t) { return new SgdUpdateKernel(read); }

}  // namespace bnexport::adapters
