#include "scratch.h"

#include <cstdint>
#include <new>

namespace bnexport::adapters {

namespace {

// Tests run the CUDA operators in a CPU session, whose memory is aligned to less.
#if defined(BNEXPORT_TEST_CUDA_ON_CPU)
constexpr size_t kSlack = 255;
#else
constexpr size_t kSlack = 0;
#endif

}  // namespace

Scratch::Scratch(const Run& run, const CudaLibrary& cuda, const ort::MemoryInfo* memory, void* stream, size_t workspace,
                 int64_t doubles)
    : api_(run.node.api), cuda_(cuda), stream_(stream) {
  const size_t aligned = (workspace + 255) / 256 * 256;
  const size_t needed = aligned + static_cast<size_t>(doubles) * sizeof(double), bytes = needed + kSlack;
  if (needed == 0) return;
  check(api_, ort::ContextAllocator::call(api_, run.context, memory, &allocator_));
  ort::Status* const status = stream != nullptr ? ort::ContextScratch::call(api_, run.context, memory, bytes, &data_)
                                                : ort::AllocatorAlloc::call(api_, allocator_, bytes, &data_);
  if (status != nullptr || data_ == nullptr) {
    ort::ReleaseAllocator::call(api_, allocator_);
    check(api_, status);
    throw std::bad_alloc();
  }
  auto* const start = static_cast<char*>(data_);
  workspace_ = start + ((256 - reinterpret_cast<uintptr_t>(start) % 256) & kSlack);
  next_ = reinterpret_cast<double*>(static_cast<char*>(workspace_) + aligned);
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  if (stream_ == nullptr) cuda_.wait(stream_, nullptr, 0);
  if (ort::Status* status = ort::AllocatorFree::call(api_, allocator_, data_)) ort::ReleaseStatus::call(api_, status);
  ort::ReleaseAllocator::call(api_, allocator_);
}

}  // namespace bnexport::adapters
