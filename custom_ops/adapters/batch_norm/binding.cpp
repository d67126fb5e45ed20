#include "binding.h"

namespace bnexport::adapters {

namespace {

// What both directions say about their tensors, and one thread: whoever computes chooses another number.
// `exchanges`: whether the node's group is needed.
template <class Params>
void describe(Params& params, const Run& run, const std::vector<int64_t>& shape, bool exchanges) {
  const Settings& settings = run.node.settings;
  params.struct_size = sizeof(params);
  params.dtype = run.node.dtype;
  params.stats_dtype = run.node.dtype == BNEXPORT_FLOAT64 ? BNEXPORT_FLOAT64 : BNEXPORT_FLOAT32;
  params.layout = BNEXPORT_NCS;
  params.N = shape[0];
  params.C = shape[1];
  params.S = count_of({shape.begin() + 2, shape.end()});
  params.training = static_cast<int32_t>(settings.integer("training_mode"));
  params.stats_mode = static_cast<int32_t>(settings.integer("stats_mode"));
  params.group_size = exchanges ? settings.integer("group_size") : 1;
  params.threads = 1;
}

// The running statistic in input `index`, and its new value in the output of the same index.
void bind_running(const Run& run, size_t index, const void*& before, void*& after) {
  const std::string name = std::string("'") + run.node.op.inputs[index].name + "'";
  before = run[index].data;
  if (before == nullptr && run.node.settings.integer("training_mode") == 0) {
    run.fail("input " + name + " is missing, expected running statistics because training_mode is 0");
  }
  after = run.output(index);
  if (before != nullptr || after == nullptr) return;
  run.fail(std::string("output '") + run.node.op.outputs[index].name + "' is used but input " + name +
           " is missing; give the input or drop the output");
}

}  // namespace

ForwardBinding::ForwardBinding(const Run& run)
    : exchanges(run.node.settings.integer("training_mode") == 1 && run.node.settings.integer("group_size") > 1) {
  describe(params, run, run[0].shape, exchanges);
  params.x = run[0].data;
  bind_running(run, 1, params.running_mean, params.running_mean_out);
  bind_running(run, 2, params.running_var, params.running_var_out);
  params.weight = run[3].data;
  params.bias = run[4].data;
  params.momentum = run.node.settings["momentum"].number;
  params.eps = run.node.settings["eps"].number;
  saved_mean = run.output(3);
  saved_invstd = run.output(4);
  params.y = run.output(0);
}

BackwardBinding::BackwardBinding(const Run& run) : saved_mean(run[3].data), saved_invstd(run[4].data) {
  // Only what is asked for may keep a node from running: a frozen node (fixed statistics, local sums)
  // needs no group. Whether a collective is needed follows from attributes alone, not from which
  // outputs a rank happens to use, so that ranks cannot disagree about it.
  const Settings& settings = run.node.settings;
  params.grad_reduction = static_cast<int32_t>(settings.integer("grad_reduction"));
  exchanges = settings.integer("group_size") > 1 &&
              (settings.integer("training_mode") == 1 || params.grad_reduction != BNEXPORT_GRAD_LOCAL);
  describe(params, run, run[1].shape, exchanges);
  params.dy = run[0].data;
  params.x = run[1].data;
  params.weight = run[2].data;
  for (const size_t unused : {size_t{1}, size_t{2}}) run.output(unused);
  params.dweight = run.output(3);
  params.dbias = run.output(4);
  params.dx = run.output(0);
}

}  // namespace bnexport::adapters
