#include "node.h"

namespace bnexport::adapters {

namespace {

std::string node_name(ort::Api api, const ort::KernelInfo* info) {
  size_t size = 0;
  check(api, ort::InfoNodeName::call(api, info, nullptr, &size));
  std::string name(size, '\0');
  if (size > 0) check(api, ort::InfoNodeName::call(api, info, name.data(), &size));
  name.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return name;
}

// A tensor without elements may have no memory, but here null means absent.
void* memory_of(ort::Api api, const ort::Value* value) {
  static double empty = 0;
  void* data = nullptr;
  check(api, ort::GetTensorMutableData::call(api, const_cast<ort::Value*>(value), &data));
  return data != nullptr ? data : &empty;
}

}  // namespace

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

int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

bool fits(const std::vector<int64_t>& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || (size > 0 && __builtin_mul_overflow(product, size, &product))) return false;
  }
  return product < int64_t{1} << 60;
}

Node::Node(ort::Api of, const ort::KernelInfo* info, const schema::Operator& is, int32_t type)
    : api(of),
      op(is),
      dtype(type),
      name(node_name(of, info)),
      where(std::string(is.name) + " node '" + name + "'"),
      settings(of, info, is, where) {}

Run::Run(const Node& of, ort::KernelContext* in, ThreadCount& threads)
    : node(of), context(in), parallel(of.api, in, threads) {
  size_t count = 0;
  check(node.api, ort::ContextInputCount::call(node.api, context, &count));
  check(node.api, ort::ContextOutputCount::call(node.api, context, &outputs_));
  for (size_t i = 0; i < node.op.inputs.size; ++i) inputs_.push_back(read(i, count));
  for (size_t i = 0; i < node.op.inputs.size; ++i) check_shape(i);
}

void Run::fail(const std::string& message) const { throw NodeError(node.where + ": " + message); }

void Run::refuse_shape(size_t input, const std::string& expected) const {
  fail(std::string("input '") + node.op.inputs[input].name + "': got shape " + text(inputs_[input].shape) +
       ", expected " + expected);
}

void Run::require_shape(size_t input, const std::vector<int64_t>& shape, const char* as) const {
  if (inputs_[input].shape != shape) refuse_shape(input, text(shape) + ", " + as);
}

Tensor Run::read(size_t index, size_t count) const {
  Tensor tensor;
  const ort::Value* value = nullptr;
  if (index < count) check(node.api, ort::ContextInput::call(node.api, context, index, &value));
  if (value == nullptr) {
    const schema::Value& input = node.op.inputs[index];
    if (!input.optional) fail(std::string("input '") + input.name + "' is missing, expected a tensor");
    return tensor;
  }
  struct Info {
    ort::Api api;
    ort::TensorInfo* info = nullptr;
    ~Info() {
      if (info != nullptr) ort::ReleaseTensorInfo::call(api, info);
    }
  } holder{node.api};
  check(node.api, ort::GetTensorTypeAndShape::call(node.api, value, &holder.info));
  size_t rank = 0;
  check(node.api, ort::GetDimensionsCount::call(node.api, holder.info, &rank));
  tensor.shape.resize(rank);
  check(node.api, ort::GetDimensions::call(node.api, holder.info, tensor.shape.data(), rank));
  tensor.data = memory_of(node.api, value);
  return tensor;
}

void Run::check_shape(size_t index) const {
  const schema::Value& value = node.op.inputs[index];
  if (inputs_[index].data == nullptr) return;
  const std::vector<int64_t>&shape = inputs_[index].shape, &other = inputs_[value.of].shape;
  const auto of = [&] { return std::string("'") + node.op.inputs[value.of].name + "'"; };
  switch (value.shape) {
    case schema::Shape::kImage:
      if (shape.size() < 2) refuse_shape(index, "rank 2 or more: (N, C, *)");
      if (!fits(shape)) refuse_shape(index, "fewer than 2^60 elements");
      break;
    case schema::Shape::kChannels:
      if (shape.size() == 1 && shape[0] == other[1]) break;
      refuse_shape(index, text({other[1]}) + ": one value per channel of " + of() + " (dimension 1)");
    case schema::Shape::kLike:
      if (shape == other) break;
      refuse_shape(index, text(other) + ", that of " + of());
    case schema::Shape::kScalar: require_shape(index, {}, "one number"); break;
    case schema::Shape::kWindows: {
      const size_t rank = node.settings.integers("strides").size();
      if (shape.size() == 2 + rank) break;
      refuse_shape(index, "rank " + std::to_string(2 + rank) + ", as 'strides' has " + std::to_string(rank) +
                              (rank == 1 ? " number" : " numbers"));
    }
    case schema::Shape::kFree:
    case schema::Shape::kNone: break;
  }
}

float Run::scalar(size_t input, float otherwise) const {
  return inputs_[input].data != nullptr ? *inputs_[input].values() : otherwise;
}

void* Run::output(size_t index, const std::vector<int64_t>& shape) const {
  const schema::Value& declared = node.op.outputs[index];
  ort::Value* value = nullptr;
  if (index < outputs_) {
    check(node.api, ort::ContextOutput::call(node.api, context, index, shape.data(), shape.size(), &value));
  }
  if (value == nullptr) {
    if (!declared.optional) fail(std::string("output '") + declared.name + "' is missing, expected a name");
    return nullptr;
  }
  if (declared.shape == schema::Shape::kNone) {
    fail(std::string("output '") + declared.name + "' is used, expected an empty name: there is no such gradient");
  }
  return memory_of(node.api, value);
}

void* Run::output(size_t index) const {
  const schema::Value& declared = node.op.outputs[index];
  const std::vector<int64_t>& shape = inputs_[declared.of].shape;
  return declared.shape == schema::Shape::kLike ? output(index, shape) : output(index, {shape[1]});
}

}  // namespace bnexport::adapters
