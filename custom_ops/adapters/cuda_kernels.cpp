#include "cuda_kernels.h"

#include <vector>

#include "binding.h"

namespace bnexport::adapters {

namespace {

// Device memory of one run, in one piece from ONNX Runtime's allocator. It is given back when the work is
// enqueued: whoever gets it next uses it later on the same stream.
class Scratch {
 public:
  Scratch(ort::Api api, const ort::KernelContext* context, const ort::Value* beside, int64_t doubles, size_t workspace)
      : api_(api) {
    // The workspace comes first: it has the allocator's alignment.
    const size_t aligned = (workspace + 255) / 256 * 256;
    const ort::MemoryInfo* memory = nullptr;
    check(api_, ort::GetTensorMemoryInfo::call(api_, beside, &memory));
    check(api_, ort::ContextAllocator::call(api_, context, memory, &allocator_));
    if (ort::Status* status = ort::AllocatorAlloc::call(
            api_, allocator_, aligned + static_cast<size_t>(doubles) * sizeof(double), &data_)) {
      ort::ReleaseAllocator::call(api_, allocator_);
      check(api_, status);
    }
    next_ = reinterpret_cast<double*>(static_cast<char*>(data_) + aligned);
  }
  ~Scratch() {
    if (ort::Status* status = ort::AllocatorFree::call(api_, allocator_, data_)) ort::ReleaseStatus::call(api_, status);
    ort::ReleaseAllocator::call(api_, allocator_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* workspace() const { return data_; }
  double* take(int64_t doubles) {
    double* const taken = next_;
    next_ += doubles;
    return taken;
  }

 private:
  ort::Api api_;
  ort::Allocator* allocator_ = nullptr;
  void* data_ = nullptr;
  double* next_ = nullptr;
};

const ort::Value* first_input(ort::Api api, const ort::KernelContext* context) {
  const ort::Value* value = nullptr;
  check(api, ort::ContextInput::call(api, context, 0, &value));
  return value;
}

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
  throw NodeError(attributes_.where + ": " + error);
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
  const Run run(api_, context, op_, attributes_.where);
  ForwardBinding bound = bind_forward(run, attributes_, dtype_, stats_dtype());
  bnexport_forward& params = bound.params;
  const int64_t C = params.C, row_size = 2 * C + 1, size = params.group_size;
  const bool exchanges = size > 1;
  void* const stream = stream_of(api_, context);

  size_t workspace = 0;
  checked([&](char* error, size_t capacity) { return cuda_.forward_workspace(&params, &workspace, error, capacity); });
  const int64_t doubles = 2 * C + (exchanges ? row_size * (size + 1) + comm::kHeader * (size + 1) : 0);
  Scratch scratch(api_, context, first_input(api_, context), doubles, workspace);
  params.saved_mean = scratch.take(C);
  params.saved_invstd = scratch.take(C);
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
  for (const auto& [from, to] :
       {std::pair(params.saved_mean, bound.saved_mean), std::pair(params.saved_invstd, bound.saved_invstd)}) {
    if (to == nullptr) continue;
    checked([&, from = from, to = to](char* error, size_t capacity) {
      return cuda_.convert(from, BNEXPORT_FLOAT64, to, params.stats_dtype, C, stream, error, capacity);
    });
  }
}

void CudaBackwardKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, attributes_.where);
  BackwardBinding bound = bind_backward(run, op_, attributes_, dtype_, stats_dtype());
  bnexport_backward& params = bound.params;
  const int64_t C = params.C, row_size = 2 * C + 1, size = params.group_size;
  void* const stream = stream_of(api_, context);

  size_t workspace = 0;
  checked([&](char* error, size_t capacity) { return cuda_.backward_workspace(&params, &workspace, error, capacity); });
  const int64_t doubles = 2 * C + (bound.exchanges ? row_size * (size + 1) + comm::kHeader * (size + 1) : 0);
  Scratch scratch(api_, context, first_input(api_, context), doubles, workspace);
  double* const mean = scratch.take(C);
  double* const invstd = scratch.take(C);
  for (const auto& [from, to] : {std::pair(bound.saved_mean, mean), std::pair(bound.saved_invstd, invstd)}) {
    checked([&, from = from, to = to](char* error, size_t capacity) {
      return cuda_.convert(from, params.stats_dtype, to, BNEXPORT_FLOAT64, C, stream, error, capacity);
    });
  }
  params.saved_mean = mean;
  params.saved_invstd = invstd;
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
