#include "tensors.h"

#include <new>

namespace bnexport::adapters {

namespace {

constexpr int64_t kMostElements = int64_t{1} << 60;

}  // namespace

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
