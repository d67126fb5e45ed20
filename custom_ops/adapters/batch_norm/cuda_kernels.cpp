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
  if (previous_ >= 0 && previous_ != device_) kernel_.cuda_.set_device(previous_, &device_, nullptr, 0);
}

template <class Binding>
void CudaKernel<Binding>::exchange(const comm::Header& header, const double* row, double* gathered,
                                   void* stream) const {
  const std::shared_ptr<const comm::Group> members = group();
  std::vector<double> mine(static_cast<size_t>(2 * header.channels + 1));
  call(cuda_.copy, mine.data(), row, mine.size() * sizeof(double), 1, stream);
  const std::vector<double> rows = members->exchange(header, mine);
  call(cuda_.copy, gathered, rows.data(), rows.size() * sizeof(double), 0, stream);
}

template <class Binding>
void CudaKernel<Binding>::compute(const Run& run) const {
  constexpr bool forward = std::is_same_v<Binding, ForwardBinding>;
  Binding bound(run);
  auto& params = bound.params;
  const int64_t row_size = 2 * params.C + 1, size = params.group_size;
  const Place place(*this, run);
  void* const stream = place.stream;

  size_t workspace = 0;
  if constexpr (forward) {
    call(cuda_.forward_workspace, &params, &workspace);
  } else {
    call(cuda_.backward_workspace, &params, &workspace);
  }
  Scratch scratch(run, cuda_, place.memory, stream, workspace, bound.exchanges ? row_size * (size + 1) : 0);
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
    exchange(header(params), row, gathered, stream);
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
