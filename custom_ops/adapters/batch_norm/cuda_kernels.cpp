#include "cuda_kernels.h"

#include <vector>

#include "scratch.h"

namespace bnexport::adapters {

template <class Binding>
CudaKernel<Binding>::Place::Place(const CudaKernel& kernel, const Run& run) : kernel_(kernel) {
  const ort::Api api = kernel.api();
  const ort::Value* input = nullptr;
  check(api, ort::ContextStream::call(api, run.context, &stream));
  check(api, ort::ContextInput::call(api, run.context, 0, &input));
  check(api, ort::GetTensorMemoryInfo::call(api, input, &memory));
  check(api, ort::MemoryInfoId::call(api, memory, &device_));
  kernel.call(kernel.cuda_.set_device, device_, &previous_);
}

template <class Binding>
CudaKernel<Binding>::Place::~Place() {
  if (previous_ != device_) kernel_.cuda_.set_device(previous_, &device_, nullptr, 0);
}

template <class Binding>
void CudaKernel<Binding>::exchange(const comm::Header& header, const double* row, double* gathered, double* scratch,
                                   void* stream) const {
  const int64_t count = 2 * header.channels + 1, size = header.group_size;
  const auto to_host = [&](std::vector<double>& to, const double* from) {
    call(cuda_.copy, to.data(), from, to.size() * sizeof(double), 1, stream);
  };
  const auto to_device = [&](double* to, const std::vector<double>& from) {
    call(cuda_.copy, to, from.data(), from.size() * sizeof(double), 0, stream);
  };
  const std::shared_ptr<const comm::DeviceGroup> device = comm::find_device_group(node_.settings["group"].text);
  if (device == nullptr) {
    const std::shared_ptr<const comm::Group> members = group();
    std::vector<double> mine(static_cast<size_t>(count));
    to_host(mine, row);
    to_device(gathered, members->exchange(header, mine));
    return;
  }
  require_size(device->size());
  const std::vector<double> mine = comm::header_numbers(header, count);
  if (!device->has_agreed(mine)) {
    // scratch holds this rank's header, then everybody's.
    std::vector<double> all(static_cast<size_t>(size * comm::kHeader));
    to_device(scratch, mine);
    device->gather(scratch, scratch + comm::kHeader, comm::kHeader, stream);
    to_host(all, scratch + comm::kHeader);
    comm::require_agreement(device->name(), device->rank(), header, count, all, comm::kHeader);
    device->agree(mine);
  }
  device->gather(row, gathered, count, stream);
}

template <class Binding>
void CudaKernel<Binding>::compute(const Run& run) const {
  constexpr bool forward = std::is_same_v<Binding, ForwardBinding>;
  Binding bound(run);
  auto& params = bound.params;
  const int64_t row_size = 2 * params.C + 1, size = params.group_size, headers = comm::kHeader * (size + 1);
  const Place place(*this, run);
  void* const stream = place.stream;

  size_t workspace = 0;
  if constexpr (forward) {
    call(cuda_.forward_workspace, &params, &workspace);
  } else {
    call(cuda_.backward_workspace, &params, &workspace);
  }
  const int64_t doubles = bound.exchanges ? row_size * (size + 1) + headers : 0;
  Scratch scratch(run, place.memory, stream, tags_scratch_, workspace, doubles, kept_);
  params.saved_mean = static_cast<decltype(params.saved_mean)>(bound.saved_mean);
  params.saved_invstd = static_cast<decltype(params.saved_invstd)>(bound.saved_invstd);
  params.saved_as_statistics = 1;
  if (bound.exchanges) {
    double* const row = scratch.take(row_size);
    double* const gathered = scratch.take(row_size * size);
    if constexpr (forward) {
      call(cuda_.moments, &params, row, scratch.workspace(), workspace, stream);
    } else {
      call(cuda_.backward_moments, &params, row, scratch.workspace(), workspace, stream);
      params.local_moments = row;
    }
    exchange(header(params), row, gathered, scratch.take(headers), stream);
    params.gathered = gathered;
  }
  if constexpr (forward) {
    call(cuda_.forward, &params, scratch.workspace(), workspace, stream);
  } else {
    call(cuda_.backward, &params, scratch.workspace(), workspace, stream);
  }
}

template class CudaKernel<ForwardBinding>;
template class CudaKernel<BackwardBinding>;

}  // namespace bnexport::adapters
