#include "binding.h"

#include <limits>

namespace bnexport::adapters {

namespace {

// What both directions say about their tensors, and one thread: whoever computes chooses another number.
template <class Params>
Params described(const Extents& e, const Attributes& attributes, int32_t dtype, int32_t stats_dtype) {
  Params params{};
  params.struct_size = sizeof(params);
  params.dtype = dtype;
  params.stats_dtype = stats_dtype;
  params.layout = BNEXPORT_NCS;
  params.N = e.N;
  params.C = e.C;
  params.S = e.S;
  params.training = attributes.training;
  params.stats_mode = attributes.stats_mode;
  params.threads = 1;
  return params;
}

}  // namespace

Attributes read_attributes(const AttributeReader& read) {
  Attributes a;
  a.node = read.node();
  // MMCV writes the group's number as an int: its name is the number in decimal.
  a.group = read.text_or_integer("group");
  a.group_size = read.integer("group_size", 1, 1000000, "a number of processes, 1 to 1000000");
  a.training = static_cast<int32_t>(read.integer("training_mode", 0, 1, "0 or 1"));
  a.stats_mode = read.choice("stats_mode");
  if (read.op().find("grad_reduction") != nullptr) {
    a.grad_reduction = read.choice("grad_reduction");
  } else {
    a.momentum = read.number("momentum", "a number in [0, 1], the weight of the new value", 0, 1);
    a.eps = read.number("eps", "a finite number >= 0", 0, std::numeric_limits<float>::max());
  }
  return a;
}

ForwardBinding bind_forward(const Run& run, const Attributes& attributes, int32_t dtype, int32_t stats_dtype) {
  const Tensor x = run.input(0);
  const Extents e = extents(run, "input", x.shape);
  ForwardBinding bound;
  bnexport_forward& params = bound.params;
  params = described<bnexport_forward>(e, attributes, dtype, stats_dtype);
  params.x = x.data;
  params.running_mean = run.statistic(1, e.C);
  params.running_var = run.statistic(2, e.C);
  params.weight = run.statistic(3, e.C);
  params.bias = run.statistic(4, e.C);
  params.momentum = attributes.momentum;
  params.eps = attributes.eps;
  params.group_size = attributes.training ? attributes.group_size : 1;
  if (!params.training && (params.running_mean == nullptr || params.running_var == nullptr)) {
    run.fail(std::string("input '") + (params.running_mean == nullptr ? "running_mean" : "running_var") +
             "' is missing, expected running statistics because training_mode is 0");
  }

  const std::vector<int64_t> channels = {e.C};
  params.running_mean_out = run.output(1, channels);
  params.running_var_out = run.output(2, channels);
  if (params.running_mean_out != nullptr && params.running_mean == nullptr) {
    run.fail(
        "output 'running_mean_out' is used but input 'running_mean' is missing; give the input or drop the output");
  }
  if (params.running_var_out != nullptr && params.running_var == nullptr) {
    run.fail("output 'running_var_out' is used but input 'running_var' is missing; give the input or drop the output");
  }
  bound.saved_mean = run.output(3, channels);
  bound.saved_invstd = run.output(4, channels);
  params.y = run.output(0, x.shape);
  return bound;
}

BackwardBinding bind_backward(const Run& run, const schema::Operator& op, const Attributes& attributes, int32_t dtype,
                              int32_t stats_dtype) {
  const Tensor dy = run.input(0), x = run.input(1);
  if (dy.shape != x.shape) {
    run.fail("input 'grad_output': got shape " + text(dy.shape) + ", expected " + text(x.shape) + ", that of 'input'");
  }
  const Extents e = extents(run, "input", x.shape);
  BackwardBinding bound;
  bnexport_backward& params = bound.params;
  params = described<bnexport_backward>(e, attributes, dtype, stats_dtype);
  params.dy = dy.data;
  params.x = x.data;
  params.weight = run.statistic(2, e.C);
  bound.saved_mean = run.statistic(3, e.C);
  bound.saved_invstd = run.statistic(4, e.C);
  if (bound.saved_mean == nullptr || bound.saved_invstd == nullptr) {
    run.fail(std::string("input '") + (bound.saved_mean == nullptr ? "saved_mean" : "saved_invstd") +
             "' is missing, expected the forward's output");
  }
  params.grad_reduction = attributes.grad_reduction;

  const std::vector<int64_t> channels = {e.C};
  for (const size_t index : {size_t{1}, size_t{2}}) {
    if (run.output(index, channels) != nullptr) {
      run.fail(std::string("output '") + op.outputs[index].name +
               "' is used, expected an empty name: there is no such gradient");
    }
  }
  // Only what is asked for may keep a node from running: a frozen node (fixed statistics, local sums)
  // needs no group. Whether a collective is needed follows from attributes alone, not from which
  // outputs a rank happens to use, so that ranks cannot disagree about it.
  bound.exchanges = attributes.group_size > 1 && (params.training || params.grad_reduction != BNEXPORT_GRAD_LOCAL);
  params.group_size = bound.exchanges ? attributes.group_size : 1;
  params.dweight = run.output(3, channels);
  params.dbias = run.output(4, channels);
  params.dx = run.output(0, x.shape);
  return bound;
}

}  // namespace bnexport::adapters
