#include "scratch.h"

#include <cstdint>
#include <new>

namespace bnexport::adapters {

// What the kernels ask for; memory of an engine need not be aligned to it.
constexpr size_t kAlignment = 256;

Scratch::Scratch(const Run& run, const CudaLibrary& cuda, const ort::MemoryInfo* memory, void* stream, size_t workspace,
                 int64_t doubles)
    : api_(run.node.api), cuda_(cuda), stream_(stream) {
  const size_t aligned = (workspace + kAlignment - 1) / kAlignment * kAlignment;
  const size_t needed = aligned + static_cast<size_t>(doubles) * sizeof(double), bytes = needed + kAlignment - 1;
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
  workspace_ = start + (kAlignment - 1 - (reinterpret_cast<uintptr_t>(start) - 1) % kAlignment);
  next_ = reinterpret_cast<double*>(static_cast<char*>(workspace_) + aligned);
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  if (stream_ == nullptr) cuda_.wait(stream_, nullptr, 0);
  if (ort::Status* status = ort::AllocatorFree::call(api_, allocator_, data_)) ort::ReleaseStatus::call(api_, status);
  ort::ReleaseAllocator::call(api_, allocator_);
}

}  // namespace bnexport::adapters
