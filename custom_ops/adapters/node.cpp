#include "node.h"

#include <cmath>
#include <cstring>
#include <new>

namespace bnexport::adapters {

namespace {

std::string message_of(ort::Api api, ort::Status* status) {
  const std::string message = ort::GetErrorMessage::call(api, status);
  ort::ReleaseStatus::call(api, status);
  return message;
}

double read_number(ort::Api api, const ort::KernelInfo* info, const std::string& where, const schema::Attribute& a) {
  if (a.kind == schema::Kind::kFloat) {
    auto value = static_cast<float>(a.number);
    float read = 0;
    if (attribute_present(api, ort::AttributeFloat::call(api, info, a.name, &read), where, a)) value = read;
    return static_cast<double>(value);
  }
  int64_t read = 0;
  if (!attribute_present(api, ort::AttributeInt::call(api, info, a.name, &read), where, a)) return a.number;
  // Past 2^53 a double would round; no attribute of ours may be that large.
  if (read > (int64_t{1} << 53) || read < -(int64_t{1} << 53)) {
    throw NodeError(where + ": attribute '" + a.name + "': got " + std::to_string(read) + ", expected less than 2^53");
  }
  return static_cast<double>(read);
}

std::string read_text(ort::Api api, const ort::KernelInfo* info, const std::string& where, const schema::Attribute& a) {
  size_t size = 0;
  if (!attribute_present(api, ort::AttributeString::call(api, info, a.name, nullptr, &size), where, a)) return a.text;
  std::string value(size, '\0');
  if (size == 0) return value;
  check(api, ort::AttributeString::call(api, info, a.name, value.data(), &size));
  value.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return value;
}

// MMCV writes the group's number as an int: its name is the number in decimal.
std::string read_group(ort::Api api, const ort::KernelInfo* info, const std::string& where,
                       const schema::Attribute& a) {
  int64_t number = 0;
  ort::Status* status = ort::AttributeInt::call(api, info, a.name, &number);
  if (status == nullptr) return std::to_string(number);
  ort::ReleaseStatus::call(api, status);
  return read_text(api, info, where, a);
}

int32_t index_of(const std::string& where, const schema::Attribute& a, const std::string& value) {
  std::string allowed;
  for (int32_t i = 0; a.allowed_texts[i] != nullptr; ++i) {
    if (value == a.allowed_texts[i]) return i;
    allowed += (i > 0 ? ", '" : "'") + std::string(a.allowed_texts[i]) + "'";
  }
  throw NodeError(where + ": attribute '" + a.name + "': got '" + value + "', expected one of " + allowed);
}

std::string number(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.9g", value);
  return buffer;
}

bool is(const schema::Attribute& a, const char* name) { return std::strcmp(a.name, name) == 0; }

// The schema has an attribute that nothing below reads: a node would run with its default.
[[noreturn]] void unread(const std::string& where, const schema::Attribute& a) {
  throw NodeError(where + ": attribute '" + a.name + "' is in the schema and is not read; add it to read_attributes");
}

void set(Attributes& attributes, const schema::Attribute& a, double value) {
  const std::string prefix = attributes.where + ": attribute '" + a.name + "': got " + number(value) + ", expected ";
  if (is(a, "training_mode")) {
    if (value != 0 && value != 1) throw NodeError(prefix + "0 or 1");
    attributes.training = static_cast<int32_t>(value);
  } else if (is(a, "momentum")) {
    if (!(value >= 0 && value <= 1)) throw NodeError(prefix + "a number in [0, 1], the weight of the new value");
    attributes.momentum = value;
  } else if (is(a, "eps")) {
    if (!(value >= 0 && std::isfinite(value))) throw NodeError(prefix + "a finite number >= 0");
    attributes.eps = value;
  } else if (is(a, "group_size")) {
    if (!(value >= 1 && value <= 1e6)) throw NodeError(prefix + "a number of processes, 1 to 1000000");
    attributes.group_size = static_cast<int64_t>(value);
  } else {
    unread(attributes.where, a);
  }
}

}  // namespace

void check(ort::Api api, ort::Status* status) {
  if (status != nullptr) throw NodeError("bnexport: ONNX Runtime: " + message_of(api, status));
}

bool attribute_present(ort::Api api, ort::Status* status, const std::string& where, const schema::Attribute& a) {
  if (status == nullptr) return true;
  const std::string message = message_of(api, status);
  if (message.find("No attribute with") != std::string::npos) return false;
  throw NodeError(where + ": attribute '" + a.name + "': got a value of another type, expected " +
                  (a.kind == schema::Kind::kInts ? "a list of ints" : std::string("a single ") + kind_name(a.kind)) +
                  " (" + message + ")");
}

std::string node_name(ort::Api api, const ort::KernelInfo* info) {
  size_t size = 0;
  check(api, ort::InfoNodeName::call(api, info, nullptr, &size));
  std::string name(size, '\0');
  if (size > 0) check(api, ort::InfoNodeName::call(api, info, name.data(), &size));
  name.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return name;
}

std::string where_of(const schema::Operator& op, const std::string& node) {
  return std::string(op.name) + " node '" + node + "'";
}

Attributes read_attributes(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op) {
  Attributes attributes;
  attributes.node = node_name(api, info);
  attributes.where = where_of(op, attributes.node);
  for (const schema::Attribute& a : op.attributes) {
    if (a.kind != schema::Kind::kString) {
      set(attributes, a, read_number(api, info, attributes.where, a));
      continue;
    }
    if (is(a, "group")) {
      attributes.group = read_group(api, info, attributes.where, a);
      continue;
    }
    const std::string value = read_text(api, info, attributes.where, a);
    if (is(a, "stats_mode")) {
      attributes.stats_mode = index_of(attributes.where, a, value);
    } else if (is(a, "grad_reduction")) {
      attributes.grad_reduction = index_of(attributes.where, a, value);
    } else {
      unread(attributes.where, a);
    }
  }
  return attributes;
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
