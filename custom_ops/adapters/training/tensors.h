// What the training operators share: attributes read by name, float32 tensors, memory for a run.
#ifndef BNEXPORT_ADAPTERS_TRAINING_TENSORS_H
#define BNEXPORT_ADAPTERS_TRAINING_TENSORS_H

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../kernels/cpu/training/convolution/convolution.h"
#include "../node.h"

namespace bnexport::adapters {

// Sizes in attributes stay below 2^31, so that what kernels make of two of them fits 64 bits.
constexpr int64_t kMostSize = (int64_t{1} << 31) - 1;

class TrainingKernel : public Kernel {
 protected:
  TrainingKernel(ort::Api api, const schema::Operator& op, std::string where)
      : Kernel(api, op), where_(std::move(where)) {}

  std::string where_;
};

// A node's attributes while its session is built. Reading throws NodeError for a value of another type or
// outside its range, and where a required one is missing.
class AttributeReader {
 public:
  AttributeReader(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op)
      : api_(api), info_(info), op_(op), where_(where_of(op, node_name(api, info))) {}

  const std::string& where() const { return where_; }
  float number(const char* name) const;
  std::optional<float> optional_number(const char* name) const;
  int64_t integer(const char* name, int64_t least, int64_t most) const;
  // `count` values, or one or two when that is 0.
  std::vector<int64_t> integers(const char* name, int64_t least, size_t count) const;
  [[noreturn]] void refuse(const char* name, const std::string& got, const std::string& expected) const;

 private:
  const schema::Attribute& find(const char* name) const;
  [[noreturn]] void missing(const schema::Attribute& a) const;

  ort::Api api_;
  const ort::KernelInfo* info_;
  const schema::Operator& op_;
  std::string where_;
};

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

#endif  // BNEXPORT_ADAPTERS_TRAINING_TENSORS_H
