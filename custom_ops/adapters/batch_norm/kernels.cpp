#include "kernels.h"

#include "../../kernels/common/statistics.h"
#include "../../kernels/cpu/batch_norm/kernels.h"

namespace bnexport::adapters {

std::shared_ptr<const comm::Group> BatchNormKernel::group() const {
  const std::shared_ptr<const comm::Group> found = comm::find_group(attributes_.group);
  if (found == nullptr) {
    throw NodeError(where_ + ": attribute 'group': got '" + attributes_.group + "' with group_size " +
                    std::to_string(attributes_.group_size) +
                    ", expected the name of a registered group; call bnexport.register_group('" + attributes_.group +
                    "', process_group) in every process before the session runs");
  }
  if (found->size() != attributes_.group_size) throw NodeError(wrong_size(found->size()));
  return found;
}

std::string BatchNormKernel::wrong_size(int64_t registered) const {
  return where_ + ": attribute 'group_size': got " + std::to_string(attributes_.group_size) + ", expected " +
         std::to_string(registered) + ", the size of the registered group '" + attributes_.group +
         "'; register a group of that size or export the model for this one";
}

comm::Header BatchNormKernel::header(bool backward, int64_t channels) const {
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
  const Run run(api_, context, op_, where_);
  ForwardBinding bound = bind_forward(run, attributes_, dtype_, stats_dtype());
  bnexport_forward& params = bound.params;
  std::vector<double> saved(static_cast<size_t>(2 * params.C));
  params.saved_mean = saved.data();
  params.saved_invstd = saved.data() + params.C;

  SessionParallel parallel(api_, context, threads_);
  std::vector<double> gathered;
  if (params.group_size > 1) {
    const std::shared_ptr<const comm::Group> members = group();
    std::vector<double> row(static_cast<size_t>(2 * params.C + 1));
    cpu::forward_row(params, parallel, row.data());
    gathered = members->exchange(header(false, params.C), row);
    params.gathered = gathered.data();
  }
  cpu::forward(params, parallel);
  for (int64_t c = 0; c < params.C; ++c) {
    store_statistic(bound.saved_mean, params.stats_dtype, c, params.saved_mean[c]);
    store_statistic(bound.saved_invstd, params.stats_dtype, c, params.saved_invstd[c]);
  }
}

void BackwardKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, where_);
  BackwardBinding bound = bind_backward(run, op_, attributes_, dtype_, stats_dtype());
  bnexport_backward& params = bound.params;
  std::vector<double> saved(static_cast<size_t>(2 * params.C));
  for (int64_t c = 0; c < params.C; ++c) {
    saved[static_cast<size_t>(c)] = load_statistic(bound.saved_mean, params.stats_dtype, c, 0);
    saved[static_cast<size_t>(params.C + c)] = load_statistic(bound.saved_invstd, params.stats_dtype, c, 0);
  }
  params.saved_mean = saved.data();
  params.saved_invstd = saved.data() + params.C;

  SessionParallel parallel(api_, context, threads_);
  std::vector<double> row, gathered;
  if (bound.exchanges) {
    const std::shared_ptr<const comm::Group> members = group();
    row.resize(static_cast<size_t>(2 * params.C + 1));
    cpu::backward_row(params, parallel, row.data());
    gathered = members->exchange(header(true, params.C), row);
    params.local_moments = row.data();
    params.gathered = gathered.data();
  }
  cpu::backward(params, parallel);
}

}  // namespace bnexport::adapters
