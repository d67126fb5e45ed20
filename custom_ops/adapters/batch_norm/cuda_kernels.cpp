#include "cuda_kernels.h"

#include <vector>

#include "scratch.h"

namespace bnexport::adapters {

namespace {

void* stream_of(ort::Api api, const ort::KernelContext* context) {
  void* stream = nullptr;
  check(api, ort::ContextStream::call(api, context, &stream));
  return stream;
}

}  // namespace

template <class Call>
void CudaKernel::checked(const Call& call) const {
  char error[512] = "";
  if (call(error, sizeof(error)) == 0) return;
  throw NodeError(where_ + ": " + error);
}

CudaKernel::Place::Place(const CudaKernel& kernel, const ort::KernelContext* context)
    : kernel_(kernel), stream(stream_of(kernel.api_, context)) {
  const ort::Value* input = nullptr;
  check(kernel_.api_, ort::ContextInput::call(kernel_.api_, context, 0, &input));
  check(kernel_.api_, ort::GetTensorMemoryInfo::call(kernel_.api_, input, &memory));
  check(kernel_.api_, ort::MemoryInfoId::call(kernel_.api_, memory, &device_));
  kernel_.checked(
      [&](char* error, size_t capacity) { return kernel_.cuda_.set_device(device_, &previous_, error, capacity); });
}

CudaKernel::Place::~Place() {
  if (previous_ != device_) kernel_.cuda_.set_device(previous_, &device_, nullptr, 0);
}

void CudaKernel::exchange(const comm::Header& header, const double* row, double* gathered, double* scratch,
                          void* stream) const {
  const int64_t count = 2 * header.channels + 1, size = attributes_.group_size;
  const size_t bytes = static_cast<size_t>(count) * sizeof(double);
  const auto to_host = [&](double* to, const double* from, size_t n) {
    checked([&](char* error, size_t capacity) { return cuda_.copy(to, from, n, 1, stream, error, capacity); });
  };
  const auto to_device = [&](double* to, const double* from, size_t n) {
    checked([&](char* error, size_t capacity) { return cuda_.copy(to, from, n, 0, stream, error, capacity); });
  };
  const std::shared_ptr<const comm::DeviceGroup> device = comm::find_device_group(attributes_.group);
  if (device == nullptr) {
    const std::shared_ptr<const comm::Group> members = group();
    std::vector<double> mine(static_cast<size_t>(count));
    to_host(mine.data(), row, bytes);
    const std::vector<double> rows = members->exchange(header, mine);
    to_device(gathered, rows.data(), bytes * static_cast<size_t>(size));
    return;
  }
  if (device->size() != size) throw NodeError(wrong_size(device->size()));
  std::atomic<bool>& agreed = agreed_[header.backward ? 1 : 0];
  if (!agreed) {
    // scratch holds this rank's header, then everybody's.
    const std::vector<double> mine = comm::header_numbers(header, count);
    std::vector<double> all(static_cast<size_t>(size * comm::kHeader));
    to_device(scratch, mine.data(), mine.size() * sizeof(double));
    device->gather(scratch, scratch + comm::kHeader, comm::kHeader, stream);
    to_host(all.data(), scratch + comm::kHeader, all.size() * sizeof(double));
    comm::require_agreement(device->name(), device->rank(), header, count, all, comm::kHeader);
    agreed = true;
  }
  device->gather(row, gathered, count, stream);
}

void CudaForwardKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, where_);
  ForwardBinding bound = bind_forward(run, attributes_, dtype_, stats_dtype());
  bnexport_forward& params = bound.params;
  const int64_t C = params.C, row_size = 2 * C + 1, size = params.group_size;
  const bool exchanges = size > 1;
  const Place place(*this, context);
  void* const stream = place.stream;

  size_t workspace = 0;
  checked([&](char* error, size_t capacity) { return cuda_.forward_workspace(&params, &workspace, error, capacity); });
  const int64_t doubles = exchanges ? row_size * (size + 1) + comm::kHeader * (size + 1) : 0;
  Scratch scratch(api_, context, place.memory, stream, tags_scratch_, workspace, doubles, kept_);
  params.saved_mean = static_cast<double*>(bound.saved_mean);
  params.saved_invstd = static_cast<double*>(bound.saved_invstd);
  params.saved_as_statistics = 1;
  if (exchanges) {
    double* const row = scratch.take(row_size);
    double* const gathered = scratch.take(row_size * size);
    checked([&](char* error, size_t capacity) {
      return cuda_.moments(&params, row, scratch.workspace(), workspace, stream, error, capacity);
    });
    exchange(header(false, C), row, gathered, scratch.take(comm::kHeader * (size + 1)), stream);
    params.gathered = gathered;
  }
  checked([&](char* error, size_t capacity) {
    return cuda_.forward(&params, scratch.workspace(), workspace, stream, error, capacity);
  });
}

void CudaBackwardKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, where_);
  BackwardBinding bound = bind_backward(run, op_, attributes_, dtype_, stats_dtype());
  bnexport_backward& params = bound.params;
  const int64_t C = params.C, row_size = 2 * C + 1, size = params.group_size;
  const Place place(*this, context);
  void* const stream = place.stream;

  size_t workspace = 0;
  checked([&](char* error, size_t capacity) { return cuda_.backward_workspace(&params, &workspace, error, capacity); });
  const int64_t doubles = bound.exchanges ? row_size * (size + 1) + comm::kHeader * (size + 1) : 0;
  Scratch scratch(api_, context, place.memory, stream, tags_scratch_, workspace, doubles, kept_);
  params.saved_mean = static_cast<const double*>(bound.saved_mean);
  params.saved_invstd = static_cast<const double*>(bound.saved_invstd);
  params.saved_as_statistics = 1;
  if (bound.exchanges) {
    double* const row = scratch.take(row_size);
    double* const gathered = scratch.take(row_size * size);
    checked([&](char* error, size_t capacity) {
      return cuda_.backward_moments(&params, row, scratch.workspace(), workspace, stream, error, capacity);
    });
    exchange(header(true, C), row, gathered, scratch.take(comm::kHeader * (size + 1)), stream);
    params.local_moments = row;
    params.gathered = gathered;
  }
  checked([&](char* error, size_t capacity) {
    return cuda_.backward(&params, scratch.workspace(), workspace, stream, error, capacity);
  });
}

}  // namespace bnexport::adapters
