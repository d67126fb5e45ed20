#include "../../kernels/cpu/training/optimizer.h"

#include "operators.h"

namespace bnexport::adapters {

namespace {

// A tensor that is kept from step to step goes in and comes out, or is absent on both sides.
void require_pair(const Run& run, size_t input, size_t output, const float* in, const float* out) {
  if ((in == nullptr) == (out == nullptr)) return;
  const char *present = run.node.op.inputs[input].name, *absent = run.node.op.outputs[output].name;
  if (in == nullptr) std::swap(present, absent);
  run.fail(std::string("'") + present + "' is used but '" + absent + "' is missing, expected both or neither");
}

}  // namespace

void adam_update(const Run& run) {
  enum Input : size_t { kParameter, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kStepSize, kBiasCorrection, kKeep };
  const Settings& settings = run.node.settings;
  cpu::AdamUpdate adam{};
  adam.one_minus_beta1 = settings.number("one_minus_beta1");
  adam.beta2 = settings.number("beta2");
  adam.one_minus_beta2 = settings.number("one_minus_beta2");
  adam.eps = settings.number("eps");
  adam.weight_decay = settings.number("weight_decay");
  adam.parameter = run[kParameter].values();
  adam.grad = run[kGrad].values();
  adam.exp_avg = run[kExpAvg].values();
  adam.exp_avg_sq = run[kExpAvgSq].values();
  adam.max_exp_avg_sq = run[kMaxExpAvgSq].values();
  adam.step_size = run.scalar(kStepSize);
  adam.bias_correction2_sqrt = run.scalar(kBiasCorrection);
  adam.keep = run.scalar(kKeep, 1.0F);
  adam.new_parameter = run.output_values(0);
  adam.new_exp_avg = run.output_values(1);
  adam.new_exp_avg_sq = run.output_values(2);
  adam.new_max_exp_avg_sq = run.output_values(3);
  require_pair(run, kMaxExpAvgSq, 3, adam.max_exp_avg_sq, adam.new_max_exp_avg_sq);
  cpu::update(adam, count_of(run[kParameter].shape), run.parallel);
}

void sgd_update(const Run& run) {
  enum Input : size_t { kParameter, kGrad, kMomentumBuffer, kLr, kShare };
  cpu::SgdUpdate sgd{};
  sgd.momentum = run.node.settings.number("momentum");
  sgd.weight_decay = run.node.settings.number("weight_decay");
  sgd.nesterov = run.node.settings.integer("nesterov") == 1;
  sgd.parameter = run[kParameter].values();
  sgd.grad = run[kGrad].values();
  sgd.momentum_buffer = run[kMomentumBuffer].values();
  sgd.lr = run.scalar(kLr);
  sgd.share = run.scalar(kShare, 1.0F);
  sgd.new_parameter = run.output_values(0);
  sgd.new_momentum_buffer = run.output_values(1);
  require_pair(run, kMomentumBuffer, 1, sgd.momentum_buffer, sgd.new_momentum_buffer);
  cpu::update(sgd, count_of(run[kParameter].shape), run.parallel);
}

}  // namespace bnexport::adapters
