// Access of the operators to ONNX Runtime: tensors validated by the operator's table, outputs, threads, errors.
// Of the library, only this folder and abi/ know ONNX Runtime.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../abi/ort_abi.h"
#include "attributes.h"
#include "session_parallel.h"

namespace bnexport::adapters {

// A refusal; becomes an OrtStatus.
class NodeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// ONNX Runtime's message; releases the status.
std::string message_of(ort::Api api, ort::Status* status);
// Throws NodeError with ONNX Runtime's message, and releases the status.
void check(ort::Api api, ort::Status* status);

// Runs body and turns every exception into a status: nothing may unwind through ONNX Runtime's C ABI.
template <class Body>
ort::Status* guarded(ort::Api api, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return ort::CreateStatus::call(api, ort::kFail, "bnexport: not enough memory");
  } catch (const NodeError& error) {
    return ort::CreateStatus::call(api, ort::kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return ort::CreateStatus::call(api, ort::kFail, error.what());
  } catch (...) {
    return ort::CreateStatus::call(api, ort::kFail, "bnexport: unknown error");
  }
}

struct Node {
  Node(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, int32_t dtype);

  ort::Api api;
  const schema::Operator& op;
  int32_t dtype;
  std::string name, where;  // "Operator node 'name'", for messages
  Settings settings;
};

struct Tensor {
  const void* data = nullptr;  // null: absent
  std::vector<int64_t> shape;

  const float* values() const { return static_cast<const float*>(data); }
};

std::string text(const std::vector<int64_t>& shape);
// The number of elements of a tensor that exists.
int64_t count_of(const std::vector<int64_t>& shape);
// Whether the sizes, zeros aside, make fewer than 2^60 elements together.
bool fits(const std::vector<int64_t>& sizes);

// One run of a node: its inputs, in the shapes of the operator's table.
class Run {
 public:
  // Throws NodeError for a required input that is absent, and for a shape.
  Run(const Node& node, ort::KernelContext* context, ThreadCount& threads);

  const Tensor& operator[](size_t input) const { return inputs_[input]; }
  // The number of an input of shape ().
  float scalar(size_t input, float otherwise = 0) const;
  // Throws NodeError unless the input has this shape, which is what `as` says.
  void require_shape(size_t input, const std::vector<int64_t>& shape, const char* as) const;
  // Null when the node does not have this output; one that is required is an error.
  void* output(size_t index, const std::vector<int64_t>& shape) const;
  // In the shape of the table.
  void* output(size_t index) const;
  float* output_values(size_t index) const { return static_cast<float*>(output(index)); }
  [[noreturn]] void fail(const std::string& message) const;
  [[noreturn]] void refuse_shape(size_t input, const std::string& expected) const;

  const Node& node;
  ort::KernelContext* const context;
  mutable SessionParallel parallel;

 private:
  Tensor read(size_t index, size_t count) const;
  void check_shape(size_t index) const;

  std::vector<Tensor> inputs_;
  size_t outputs_ = 0;
};

// An operator as ONNX Runtime calls it: one object for each node of a session.
class Kernel {
 public:
  explicit Kernel(Node node) : node_(std::move(node)) {}
  virtual ~Kernel() = default;
  ort::Api api() const { return node_.api; }
  void run(ort::KernelContext* context) const { compute(Run(node_, context, threads_)); }

 protected:
  virtual void compute(const Run& run) const = 0;
  const Node node_;

 private:
  mutable ThreadCount threads_;
};

}  // namespace bnexport::adapters
