// Access of the operators to ONNX Runtime: validated tensors, outputs, threads, errors.
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

// An operator as ONNX Runtime calls it: one object for each node of a session.
class Kernel {
 public:
  explicit Kernel(const AttributeReader& read) : api_(read.api()), op_(read.op()), where_(read.where()) {}
  virtual ~Kernel() = default;
  virtual void compute(ort::KernelContext* context) const = 0;
  ort::Api api() const { return api_; }

 protected:
  ort::Api api_;
  const schema::Operator& op_;
  std::string where_;  // for messages
  mutable ThreadCount threads_;
};

struct Tensor {
  const void* data = nullptr;
  bool present = false;
  std::vector<int64_t> shape;
};

std::string text(const std::vector<int64_t>& shape);

// One run of a node.
class Run {
 public:
  Run(ort::Api api, ort::KernelContext* context, const schema::Operator& op, const std::string& where);

  // An absent optional input has present = false; an absent required one is an error.
  Tensor input(size_t index) const;
  // Checks that a present input has shape (channels,).
  const void* statistic(size_t index, int64_t channels) const;
  // Null when the node does not have the output.
  void* output(size_t index, const std::vector<int64_t>& shape) const;
  [[noreturn]] void fail(const std::string& message) const;

 private:
  ort::Api api_;
  ort::KernelContext* context_;
  const schema::Operator& op_;
  const std::string& where_;
  size_t inputs_ = 0, outputs_ = 0;
};

// (N, C, *) as N, C, S, with all products below 2^63 bytes.
struct Extents {
  int64_t N, C, S;
};
Extents extents(const Run& run, const char* name, const std::vector<int64_t>& shape);

}  // namespace bnexport::adapters
