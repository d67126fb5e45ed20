#include "kernels.h"

#include "../kernels/cpu/kernels.h"
#include "../kernels/statistics.h"

namespace bnexport::adapters {

std::shared_ptr<const comm::Group> Kernel::group() const {
  const std::shared_ptr<const comm::Group> found = comm::find_group(attributes_.group);
  if (found == nullptr) {
    throw NodeError(attributes_.where + ": attribute 'group': got '" + attributes_.group + "' with group_size " +
                    std::to_string(attributes_.group_size) +
                    ", expected the name of a registered group; call bnexport.register_group('" + attributes_.group +
                    "', process_group) in every process before the session runs");
  }
  if (found->size() != attributes_.group_size) {
    throw NodeError(attributes_.where + ": attribute 'group_size': got " + std::to_string(attributes_.group_size) +
                    ", expected " + std::to_string(found->size()) + ", the size of the registered group '" +
                    attributes_.group + "'; register a group of that size or export the model for this one");
  }
  return found;
}

comm::Header Kernel::header(bool backward, int64_t channels) const {
  comm::Header header;
  header.backward = backward;
  header.channels = channels;
  header.dtype = dtype_;
  header.stats_dtype = stats_dtype();
  header.stats_mode = attributes_.stats_mode;
  header.grad_reduction = attributes_.grad_reduction;
  header.training = attributes_.training;
  header.group_size = attributes_.group_size;
  header.node = attributes_.node;
  return header;
}

void ForwardKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, attributes_.where);
  const Tensor x = run.input(0);
  const Extents e = extents(run, "input", x.shape);
  bnexport_forward params{};
  params.struct_size = sizeof(params);
  params.dtype = dtype_;
  params.stats_dtype = stats_dtype();
  params.layout = BNEXPORT_NCS;
  params.N = e.N;
  params.C = e.C;
  params.S = e.S;
  params.x = x.data;
  params.running_mean = run.statistic(1, e.C);
  params.running_var = run.statistic(2, e.C);
  params.weight = run.statistic(3, e.C);
  params.bias = run.statistic(4, e.C);
  params.momentum = attributes_.momentum;
  params.eps = attributes_.eps;
  params.training = attributes_.training;
  params.stats_mode = attributes_.stats_mode;
  params.group_size = attributes_.training ? attributes_.group_size : 1;
  params.threads = 1;
  if (!params.training && (params.running_mean == nullptr || params.running_var == nullptr)) {
    run.fail(std::string("input '") + (params.running_mean == nullptr ? "running_mean" : "running_var") +
             "' is missing, expected running statistics because training_mode is 0");
  }

  const std::vector<int64_t> channels = {e.C};
  params.running_mean_out = run.output(1, channels);
  params.running_var_out = run.output(2, channels);
  if (params.running_mean_out != nullptr && params.running_mean == nullptr) {
    run.fail("output 'running_mean_out' is used but input 'running_mean' is missing; give the input or drop the output");
  }
  if (params.running_var_out != nullptr && params.running_var == nullptr) {
    run.fail("output 'running_var_out' is used but input 'running_var' is missing; give the input or drop the output");
  }
  void* const saved_mean_out = run.output(3, channels);
  void* const saved_invstd_out = run.output(4, channels);
  std::vector<double> saved(static_cast<size_t>(2 * e.C));
  params.saved_mean = saved.data();
  params.saved_invstd = saved.data() + e.C;
  const std::shared_ptr<const comm::Group> members = params.group_size > 1 ? group() : nullptr;
  params.y = run.output(0, x.shape);

  SessionParallel parallel(api_, context);
  std::vector<double> gathered;
  if (members != nullptr) {
    std::vector<double> row(static_cast<size_t>(2 * e.C + 1));
    cpu::forward_row(params, parallel, row.data());
    gathered = members->exchange(header(false, e.C), row);
    params.gathered = gathered.data();
  }
  cpu::forward(params, parallel);
  for (int64_t c = 0; c < e.C; ++c) {
    store_statistic(saved_mean_out, params.stats_dtype, c, params.saved_mean[c]);
    store_statistic(saved_invstd_out, params.stats_dtype, c, params.saved_invstd[c]);
  }
}

void BackwardKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, attributes_.where);
  const Tensor dy = run.input(0), x = run.input(1);
  if (dy.shape != x.shape) {
    run.fail("input 'grad_output': got shape " + text(dy.shape) + ", expected " + text(x.shape) + ", that of 'input'");
  }
  const Extents e = extents(run, "input", x.shape);
  bnexport_backward params{};
  params.struct_size = sizeof(params);
  params.dtype = dtype_;
  params.stats_dtype = stats_dtype();
  params.layout = BNEXPORT_NCS;
  params.N = e.N;
  params.C = e.C;
  params.S = e.S;
  params.dy = dy.data;
  params.x = x.data;
  params.weight = run.statistic(2, e.C);
  const void* const mean = run.statistic(3, e.C);
  const void* const invstd = run.statistic(4, e.C);
  if (mean == nullptr || invstd == nullptr) {
    run.fail(std::string("input '") + (mean == nullptr ? "saved_mean" : "saved_invstd") + "' is missing, expected the forward's output");
  }
  std::vector<double> saved(static_cast<size_t>(2 * e.C));
  for (int64_t c = 0; c < e.C; ++c) {
    saved[static_cast<size_t>(c)] = load_statistic(mean, params.stats_dtype, c, 0);
    saved[static_cast<size_t>(e.C + c)] = load_statistic(invstd, params.stats_dtype, c, 0);
  }
  params.saved_mean = saved.data();
  params.saved_invstd = saved.data() + e.C;
  params.training = attributes_.training;
  params.stats_mode = attributes_.stats_mode;
  params.grad_reduction = attributes_.grad_reduction;
  params.group_size = attributes_.group_size;
  params.threads = 1;

  const std::vector<int64_t> channels = {e.C};
  for (const size_t index : {size_t{1}, size_t{2}}) {
    if (run.output(index, channels) != nullptr) {
      run.fail(std::string("output '") + op_.outputs[index].name + "' is used, expected an empty name: there is no such gradient");
    }
  }
  // Only what is asked for may keep a node from running: a frozen node (fixed statistics, local sums)
  // needs no group. Whether a collective is needed follows from attributes alone, not from which
  // outputs a rank happens to use, so that ranks cannot disagree about it.
  const bool exchanges = params.group_size > 1 && (params.training || params.grad_reduction != BNEXPORT_GRAD_LOCAL);
  const std::shared_ptr<const comm::Group> members = exchanges ? group() : nullptr;
  if (!exchanges) params.group_size = 1;
  params.dweight = run.output(3, channels);
  params.dbias = run.output(4, channels);
  params.dx = run.output(0, x.shape);

  SessionParallel parallel(api_, context);
  std::vector<double> row, gathered;
  if (members != nullptr) {
    row.resize(static_cast<size_t>(2 * e.C + 1));
    cpu::backward_row(params, parallel, row.data());
    gathered = members->exchange(header(true, e.C), row);
    params.local_moments = row.data();
    params.gathered = gathered.data();
  }
  cpu::backward(params, parallel);
}

}  // namespace bnexport::adapters
