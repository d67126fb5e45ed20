// The two operators on the CUDA provider: the same nodes, on ONNX Runtime's stream and in its memory.
#pragma once

#include <atomic>

#include "cuda_library.h"
#include "kernels.h"
#include "scratch.h"

namespace bnexport::adapters {

class CudaKernel : public BatchNormKernel {
 public:
  // `tags_scratch`: the API has ContextScratch.
  CudaKernel(const AttributeReader& read, int32_t dtype, bool tags_scratch)
      : BatchNormKernel(read, dtype), cuda_(*cuda_library()), tags_scratch_(tags_scratch), kept_(api_, cuda_) {}

 protected:
  // Where a run computes. The device of the first input is the current one as long as this lives: ONNX Runtime
  // does not always set it.
  class Place {
   public:
    Place(const CudaKernel& kernel, const ort::KernelContext* context);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    const CudaKernel& kernel_;
    int device_ = 0, previous_ = 0;

   public:
    void* const stream;
    const ort::MemoryInfo* memory = nullptr;
  };
  // Rows of all processes from this process's, both on the device. Over the device's group where one is
  // registered (the host only waits in the node's first run, to compare what the processes are running),
  // else through the host.
  void exchange(const comm::Header& header, const double* row, double* gathered, double* scratch, void* stream) const;
  // Throws NodeError with the message when a call of the CUDA library failed.
  template <class Call>
  void checked(const Call& call) const;

  const CudaLibrary& cuda_;
  const bool tags_scratch_;
  mutable Kept kept_;

 private:
  // Set after the group has agreed on this node; kernels are shared by concurrent runs.
  mutable std::atomic<bool> agreed_[2] = {{false}, {false}};
};

class CudaForwardKernel final : public CudaKernel {
 public:
  using CudaKernel::CudaKernel;
  void compute(ort::KernelContext* context) const override;
};

class CudaBackwardKernel final : public CudaKernel {
 public:
  using CudaKernel::CudaKernel;
  void compute(ort::KernelContext* context) const override;
};

}  // namespace bnexport::adapters
