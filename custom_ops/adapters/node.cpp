#include "node.h"

namespace bnexport::adapters {

std::string message_of(ort::Api api, ort::Status* status) {
  const std::string message = ort::GetErrorMessage::call(api, status);
  ort::ReleaseStatus::call(api, status);
  return message;
}

void check(ort::Api api, ort::Status* status) {
  if (status != nullptr) throw NodeError("bnexport: ONNX Runtime: " + message_of(api, status));
}

std::string text(const std::vector<int64_t>& shape) {
  std::string result = "(";
  for (size_t i = 0; i < shape.size(); ++i) result += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return result + (shape.size() == 1 ? ",)" : ")");
}

Run::Run(ort::Api api, ort::KernelContext* context, const schema::Operator& op, const std::string& where)
    : api_(api), context_(context), op_(op), where_(where) {
  check(api_, ort::ContextInputCount::call(api_, context_, &inputs_));
  check(api_, ort::ContextOutputCount::call(api_, context_, &outputs_));
}

void Run::fail(const std::string& message) const { throw NodeError(where_ + ": " + message); }

Tensor Run::input(size_t index) const {
  Tensor tensor;
  const ort::Value* value = nullptr;
  if (index < inputs_) check(api_, ort::ContextInput::call(api_, context_, index, &value));
  if (value == nullptr) {
    if (!op_.inputs[index].optional) {
      fail(std::string("input '") + op_.inputs[index].name + "' is missing, expected a tensor");
    }
    return tensor;
  }
  struct Info {
    ort::Api api;
    ort::TensorInfo* info = nullptr;
    ~Info() {
      if (info != nullptr) ort::ReleaseTensorInfo::call(api, info);
    }
  } holder{api_};
  check(api_, ort::GetTensorTypeAndShape::call(api_, value, &holder.info));
  size_t rank = 0;
  check(api_, ort::GetDimensionsCount::call(api_, holder.info, &rank));
  tensor.shape.resize(rank);
  check(api_, ort::GetDimensions::call(api_, holder.info, tensor.shape.data(), rank));
  void* data = nullptr;
  check(api_, ort::GetTensorMutableData::call(api_, const_cast<ort::Value*>(value), &data));
  tensor.data = data;
  tensor.present = true;
  return tensor;
}

const void* Run::statistic(size_t index, int64_t channels) const {
  const Tensor tensor = input(index);
  if (!tensor.present) return nullptr;
  if (tensor.shape.size() != 1 || tensor.shape[0] != channels) {
    fail(std::string("input '") + op_.inputs[index].name + "': got shape " + text(tensor.shape) + ", expected (" +
         std::to_string(channels) + ",): one value per channel of '" +
         (op_.inputs[1].type == 'T' ? op_.inputs[1].name : op_.inputs[0].name) + "' (dimension 1)");
  }
  // A tensor without elements may have no memory, but here null means absent.
  static const double kEmpty = 0;
  return tensor.data != nullptr ? tensor.data : &kEmpty;
}

void* Run::output(size_t index, const std::vector<int64_t>& shape) const {
  if (index >= outputs_) return nullptr;
  ort::Value* value = nullptr;
  check(api_, ort::ContextOutput::call(api_, context_, index, shape.data(), shape.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(api_, ort::GetTensorMutableData::call(api_, value, &data));
  static double empty = 0;
  return data != nullptr ? data : &empty;
}

Extents extents(const Run& run, const char* name, const std::vector<int64_t>& shape) {
  if (shape.size() < 2) {
    run.fail(std::string("input '") + name + "': got shape " + text(shape) + ", expected rank 2 or more: (N, C, *)");
  }
  Extents e{shape[0], shape[1], 1};
  bool overflow = false;
  for (size_t i = 2; i < shape.size(); ++i) overflow |= __builtin_mul_overflow(e.S, shape[i], &e.S);
  int64_t bytes = 8;
  for (const int64_t dimension : {e.N, e.C, e.S}) {
    // A dimension of 0 must not hide the others: C alone sizes buffers.
    overflow |= dimension < 0 || __builtin_mul_overflow(bytes, dimension > 0 ? dimension : 1, &bytes);
  }
  if (overflow) {
    run.fail(std::string("input '") + name + "': got shape " + text(shape) + ", expected fewer than 2^60 elements");
  }
  return e;
}

}  // namespace bnexport::adapters
