// The two operators on the CUDA provider: the same nodes, on ONNX Runtime's stream and in its memory.
#pragma once

#include "cuda_library.h"
#include "kernels.h"

namespace bnexport::adapters {

// Binding: ForwardBinding or BackwardBinding.
template <class Binding>
class CudaKernel final : public BatchNormKernel {
 public:
  explicit CudaKernel(Node node) : BatchNormKernel(std::move(node)), cuda_(*cuda_library()) {}
  void compute(const Run& run) const override;

 private:
  // Where a run computes. The device of the first input is the current one as long as this lives: ONNX Runtime
  // does not always set it.
  class Place {
   public:
    Place(const CudaKernel& kernel, const Run& run);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    void* stream = nullptr;
    const ort::MemoryInfo* memory = nullptr;

   private:
    const CudaKernel& kernel_;
    int device_ = 0, previous_ = 0;
  };
  // Rows of all processes from this process's, both on the device, through the host.
  void exchange(const comm::Header& header, const double* row, double* gathered, void* stream) const;
  // Calls the CUDA library. Throws NodeError with the message when it fails.
  template <class... Parameters, class... Arguments>
  void call(int (*function)(Parameters...), Arguments... arguments) const {
    char error[512] = "";
    if (function(arguments..., error, sizeof(error)) != 0) throw NodeError(node_.where + ": " + error);
  }

  const CudaLibrary& cuda_;
};

}  // namespace bnexport::adapters
