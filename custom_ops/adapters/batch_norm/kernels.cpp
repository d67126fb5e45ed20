#include "kernels.h"

#include "../../kernels/common/statistics.h"
#include "../../kernels/cpu/batch_norm/kernels.h"

namespace bnexport::adapters {

std::shared_ptr<const comm::Group> BatchNormKernel::group() const {
  const std::string& name = node_.settings["group"].text;
  const std::shared_ptr<const comm::Group> found = comm::find_group(name);
  if (found == nullptr) {
    throw NodeError(node_.where + ": attribute 'group': got '" + name + "' with group_size " +
                    std::to_string(node_.settings.integer("group_size")) +
                    ", expected the name of a registered group; call bnexport.register_group('" + name +
                    "', process_group) in every process before the session runs");
  }
  require_size(found->size());
  return found;
}

void BatchNormKernel::require_size(int64_t registered) const {
  const int64_t size = node_.settings.integer("group_size");
  if (registered == size) return;
  throw NodeError(node_.where + ": attribute 'group_size': got " + std::to_string(size) + ", expected " +
                  std::to_string(registered) + ", the size of the registered group '" + node_.settings["group"].text +
                  "'; register a group of that size or export the model for this one");
}

void ForwardKernel::compute(const Run& run) const {
  ForwardBinding bound(run);
  bnexport_forward& params = bound.params;
  std::vector<double> saved(static_cast<size_t>(2 * params.C)), gathered;
  params.saved_mean = saved.data();
  params.saved_invstd = saved.data() + params.C;
  if (bound.exchanges) {
    const std::shared_ptr<const comm::Group> members = group();
    std::vector<double> row(static_cast<size_t>(2 * params.C + 1));
    cpu::forward_row(params, run.parallel, row.data());
    gathered = members->exchange(header(params), row);
    params.gathered = gathered.data();
  }
  cpu::forward(params, run.parallel);
  for (int64_t c = 0; c < params.C; ++c) {
    store_statistic(bound.saved_mean, params.stats_dtype, c, params.saved_mean[c]);
    store_statistic(bound.saved_invstd, params.stats_dtype, c, params.saved_invstd[c]);
  }
}

void BackwardKernel::compute(const Run& run) const {
  BackwardBinding bound(run);
  bnexport_backward& params = bound.params;
  std::vector<double> saved(static_cast<size_t>(2 * params.C)), row, gathered;
  for (int64_t c = 0; c < params.C; ++c) {
    saved[static_cast<size_t>(c)] = load_statistic(bound.saved_mean, params.stats_dtype, c, 0);
    saved[static_cast<size_t>(params.C + c)] = load_statistic(bound.saved_invstd, params.stats_dtype, c, 0);
  }
  params.saved_mean = saved.data();
  params.saved_invstd = saved.data() + params.C;
  if (bound.exchanges) {
    const std::shared_ptr<const comm::Group> members = group();
    row.resize(static_cast<size_t>(2 * params.C + 1));
    cpu::backward_row(params, run.parallel, row.data());
    gathered = members->exchange(header(params), row);
    params.local_moments = row.data();
    params.gathered = gathered.data();
  }
  cpu::backward(params, run.parallel);
}

}  // namespace bnexport::adapters
