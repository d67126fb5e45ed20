#include "scratch.h"

#include <algorithm>
#include <new>

namespace bnexport::adapters {

namespace {

void give_back(ort::Api api, ort::Allocator* allocator, void* data) {
  if (ort::Status* status = ort::AllocatorFree::call(api, allocator, data)) ort::ReleaseStatus::call(api, status);
  ort::ReleaseAllocator::call(api, allocator);
}

}  // namespace

Kept::~Kept() {
  for (const Piece& piece : pieces_) release(piece, true);
}

void Kept::keep(ort::Allocator* allocator, void* data, void* stream) {
  void* mark = nullptr;
  // Without a mark nobody knows when the piece is free: it stays until the session goes.
  cuda_.mark(stream, &mark, nullptr, 0);
  const std::scoped_lock lock(mutex_);
  pieces_.push_back({allocator, data, mark});
  if (mark != nullptr) sweep();  // in a capture an event must not be queried
}

void Kept::sweep() {
  const auto given_back = [&](const Piece& piece) { return piece.mark != nullptr && release(piece, false); };
  pieces_.erase(std::remove_if(pieces_.begin(), pieces_.end(), given_back), pieces_.end());
}

bool Kept::release(const Piece& piece, bool wait) const {
  int32_t passed = 1;
  // After an error of the device nothing runs on it any more.
  if (piece.mark != nullptr && cuda_.passed(piece.mark, wait ? 1 : 0, &passed, nullptr, 0) == 0 && passed == 0) {
    return false;
  }
  give_back(api_, piece.allocator, piece.data);
  return true;
}

Scratch::Scratch(const Run& run, const ort::MemoryInfo* memory, void* stream, bool tagged, size_t workspace,
                 int64_t doubles, Kept& kept)
    : api_(run.node.api), stream_(stream), tagged_(tagged && stream != nullptr), kept_(kept) {
  const size_t aligned = (workspace + 255) / 256 * 256;
  const size_t bytes = aligned + static_cast<size_t>(doubles) * sizeof(double);
  if (bytes == 0) return;
  check(api_, ort::ContextAllocator::call(api_, run.context, memory, &allocator_));
  ort::Status* const status = tagged_ ? ort::ContextScratch::call(api_, run.context, memory, bytes, &data_)
                                      : ort::AllocatorAlloc::call(api_, allocator_, bytes, &data_);
  if (status != nullptr || data_ == nullptr) {
    ort::ReleaseAllocator::call(api_, allocator_);
    check(api_, status);
    throw std::bad_alloc();
  }
  next_ = reinterpret_cast<double*>(static_cast<char*>(data_) + aligned);
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  if (tagged_) {
    give_back(api_, allocator_, data_);
  } else {
    kept_.keep(allocator_, data_, stream_);
  }
}

}  // namespace bnexport::adapters
