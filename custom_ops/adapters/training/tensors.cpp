#include "tensors.h"

#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace bnexport::adapters {

namespace {

constexpr int64_t kMostElements = int64_t{1} << 60;

}  // namespace

const schema::Attribute& AttributeReader::find(const char* name) const {
  for (const schema::Attribute& a : op_.attributes) {
    if (std::strcmp(a.name, name) == 0) return a;
  }
  throw std::logic_error(where_ + ": attribute '" + name + "' is not in the operator's table");
}

void AttributeReader::missing(const schema::Attribute& a) const {
  throw NodeError(where_ + ": attribute '" + a.name + "' is missing, expected " +
                  (a.kind == schema::Kind::kInts ? "a list of ints" : std::string("a single ") + kind_name(a.kind)));
}

void AttributeReader::refuse(const char* name, const std::string& got, const std::string& expected) const {
  throw NodeError(where_ + ": attribute '" + name + "': got " + got + ", expected " + expected);
}

std::optional<float> AttributeReader::optional_number(const char* name) const {
  const schema::Attribute& a = find(name);
  float value = 0;
  if (!attribute_present(api_, ort::AttributeFloat::call(api_, info_, name, &value), where_, a)) {
    if (a.required) missing(a);
    if (std::isnan(a.number)) return std::nullopt;
    return static_cast<float>(a.number);
  }
  if (std::isnan(value)) refuse(name, "nan", "a number");
  return value;
}

float AttributeReader::number(const char* name) const {
  const std::optional<float> value = optional_number(name);
  if (!value.has_value()) missing(find(name));
  return *value;
}

int64_t AttributeReader::integer(const char* name, int64_t least, int64_t most) const {
  const schema::Attribute& a = find(name);
  int64_t value = 0;
  if (!attribute_present(api_, ort::AttributeInt::call(api_, info_, name, &value), where_, a)) missing(a);
  if (value < least || value > most) {
    refuse(name, std::to_string(value),
           "a number within [" + std::to_string(least) + ", " + std::to_string(most) + "]");
  }
  return value;
}

std::vector<int64_t> AttributeReader::integers(const char* name, int64_t least, size_t count) const {
  const schema::Attribute& a = find(name);
  size_t size = 0;
  if (!attribute_present(api_, ort::AttributeInts::call(api_, info_, name, nullptr, &size), where_, a)) missing(a);
  std::vector<int64_t> result(size);
  if (size > 0) check(api_, ort::AttributeInts::call(api_, info_, name, result.data(), &size));
  bool within = count > 0 ? size == count : size == 1 || size == 2;
  for (const int64_t value : result) within = within && value >= least && value <= kMostSize;
  if (!within) {
    const std::string expected = count > 0 ? std::to_string(count) : "1 or 2";
    refuse(name, text(result), expected + " numbers within [" + std::to_string(least) + ", 2^31)");
  }
  return result;
}

const float* values(const Tensor& tensor) {
  // A tensor without elements may have no memory.
  static const float kEmpty = 0;
  return !tensor.present || tensor.data != nullptr ? static_cast<const float*>(tensor.data) : &kEmpty;
}

float* output_values(const Run& run, const schema::Operator& op, size_t index, const std::vector<int64_t>& shape) {
  void* const data = run.output(index, shape);
  if (data == nullptr && !op.outputs[index].optional) {
    run.fail(std::string("output '") + op.outputs[index].name + "' is missing, expected a name");
  }
  return static_cast<float*>(data);
}

float scalar(const Run& run, const schema::Operator& op, size_t index) {
  const Tensor tensor = run.input(index);
  if (!tensor.shape.empty()) {
    run.fail(std::string("input '") + op.inputs[index].name + "': got shape " + text(tensor.shape) +
             ", expected (), one number");
  }
  return *values(tensor);
}

void require_shape(const Run& run, const schema::Operator& op, size_t index, const Tensor& tensor,
                   const std::vector<int64_t>& shape, const char* as) {
  if (tensor.shape == shape) return;
  run.fail(std::string("input '") + op.inputs[index].name + "': got shape " + text(tensor.shape) + ", expected " +
           text(shape) + ", " + as);
}

int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

bool fits(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    // Zeros aside, so that the order of the factors does not matter.
    if (factor != 0 && (__builtin_mul_overflow(product, factor, &product) || product > kMostElements)) return false;
  }
  return true;
}

ArenaWorkspace::ArenaWorkspace(ort::Api api, const ort::KernelContext* context) : api_(api) {
  const ort::Value* input = nullptr;
  const ort::MemoryInfo* memory = nullptr;
  check(api_, ort::ContextInput::call(api_, context, 0, &input));
  check(api_, ort::GetTensorMemoryInfo::call(api_, input, &memory));
  check(api_, ort::ContextAllocator::call(api_, context, memory, &allocator_));
}

ArenaWorkspace::~ArenaWorkspace() {
  for (void* piece : pieces_) {
    if (ort::Status* status = ort::AllocatorFree::call(api_, allocator_, piece)) ort::ReleaseStatus::call(api_, status);
  }
  ort::ReleaseAllocator::call(api_, allocator_);
}

void* ArenaWorkspace::allocate(size_t bytes) {
  pieces_.reserve(pieces_.size() + 1);
  void* piece = nullptr;
  if (ort::Status* status = ort::AllocatorAlloc::call(api_, allocator_, bytes, &piece)) {
    ort::ReleaseStatus::call(api_, status);
    throw std::bad_alloc();
  }
  if (piece == nullptr) throw std::bad_alloc();
  pieces_.push_back(piece);
  return piece;
}

}  // namespace bnexport::adapters
