// Shared parts of the training operators: float32 tensors, memory for a run.
#pragma once

#include <initializer_list>
#include <vector>

#include "../../kernels/cpu/training/convolution/convolution.h"
#include "../node.h"

namespace bnexport::adapters {

// An input's values; never null, unless it is absent.
const float* values(const Tensor& tensor);
// Null when an optional output is absent; a required one that is absent is an error.
float* output_values(const Run& run, const schema::Operator& op, size_t index, const std::vector<int64_t>& shape);
// The number in an input of shape ().
float scalar(const Run& run, const schema::Operator& op, size_t index);
void require_shape(const Run& run, const schema::Operator& op, size_t index, const Tensor& tensor,
                   const std::vector<int64_t>& shape, const char* as);
// The number of elements of a tensor that exists.
int64_t count_of(const std::vector<int64_t>& shape);
// Whether the factors, none of them negative, make no more than 2^60 together.
bool fits(std::initializer_list<int64_t> factors);

// A run's memory from ONNX Runtime's arena.
class ArenaWorkspace final : public cpu::Workspace {
 public:
  ArenaWorkspace(ort::Api api, const ort::KernelContext* context);
  ~ArenaWorkspace() override;
  ArenaWorkspace(const ArenaWorkspace&) = delete;
  ArenaWorkspace& operator=(const ArenaWorkspace&) = delete;
  void* allocate(size_t bytes) override;

 private:
  ort::Api api_;
  ort::Allocator* allocator_ = nullptr;
  std::vector<void*> pieces_;
};

}  // namespace bnexport::adapters
