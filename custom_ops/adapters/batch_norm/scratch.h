// Device memory of one run of a node.
//
// The work on it is only enqueued when the run returns, so giving it back means: it may be handed out again for
// later work on the same stream, and for no other. From API 18 on ONNX Runtime's arena knows the stream of such
// a piece. A run without a stream of its own, which ONNX Runtime makes for no provider of today, waits for its work.
#pragma once

#include "../node.h"
#include "cuda_library.h"

namespace bnexport::adapters {

class Scratch {
 public:
  // `memory`: of a tensor on the device.
  Scratch(const Run& run, const CudaLibrary& cuda, const ort::MemoryInfo* memory, void* stream, size_t workspace,
          int64_t doubles);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Aligned as the allocator's memory is.
  void* workspace() const { return workspace_; }
  double* take(int64_t doubles) {
    double* const taken = next_;
    next_ += doubles;
    return taken;
  }

 private:
  ort::Api api_;
  const CudaLibrary& cuda_;
  void* stream_;
  ort::Allocator* allocator_ = nullptr;
  void *data_ = nullptr, *workspace_ = nullptr;
  double* next_ = nullptr;
};

}  // namespace bnexport::adapters
