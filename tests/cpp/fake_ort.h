// ONNX Runtime as far as the adapters see it: a table of its functions that gives what a test tells it to give.
//
// A node's runs have a stream and memory on a device where the test says so. Memory comes dirty, from an arena
// that does with streams what ONNX Runtime's does: a free piece goes to the stream that it was used on, and one
// that was asked for without a stream goes to any.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../custom_ops/abi/ort_abi.h"

extern "C" ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base);

namespace fake_ort {

inline int64_t elements(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

struct Message {
  std::string text;
};
struct Shape {
  std::vector<int64_t> sizes;
};
struct MemoryInfo {
  int device = 0;
};
struct Tensor {
  std::vector<int64_t> shape;
  std::unique_ptr<unsigned char[]> data;
  MemoryInfo memory{};
};

class Arena {
 public:
  void* allocate(size_t bytes, void* stream) {
    const std::scoped_lock lock(mutex_);
    for (Piece& piece : pieces_) {
      if (!piece.free || piece.bytes < bytes || (piece.stream != nullptr && piece.stream != stream)) continue;
      piece.free = false;
      piece.stream = stream;
      return piece.data;
    }
    auto* const data = static_cast<unsigned char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    std::memset(data, 0xff, bytes);
    pieces_.push_back({data, bytes, stream, false});
    return data;
  }
  void release(void* data) {
    const std::scoped_lock lock(mutex_);
    for (Piece& piece : pieces_) {
      if (piece.data == data) piece.free = true;
    }
  }
  size_t pieces() const { return pieces_.size(); }
  size_t used() const {
    return static_cast<size_t>(std::count_if(pieces_.begin(), pieces_.end(), [](const Piece& p) { return !p.free; }));
  }
  ~Arena() {
    for (const Piece& piece : pieces_) std::free(piece.data);
  }

 private:
  struct Piece {
    unsigned char* data;
    size_t bytes;
    void* stream;
    bool free;
  };
  std::mutex mutex_;
  std::vector<Piece> pieces_;
};
struct Attribute {
  std::string text;  // or a number
  int64_t integer = 0;
};
struct Node {
  std::string name;
  std::vector<std::pair<std::string, Attribute>> attributes;
  std::vector<std::unique_ptr<Tensor>> inputs;  // null: absent
  std::vector<bool> outputs;                    // present
  std::array<std::unique_ptr<Tensor>, 8> made;
  const ort::CustomOp* op = nullptr;
  bool fails = false;  // allocating an output
  void* stream = nullptr;
  Arena* arena = nullptr;
};

inline ort::Status* status(const std::string& text) { return reinterpret_cast<ort::Status*>(new Message{text}); }

inline const Attribute* find(const ort::KernelInfo* info, const char* name) {
  for (const auto& [known, value] : reinterpret_cast<const Node*>(info)->attributes) {
    if (known == name) return &value;
  }
  return nullptr;
}

inline ort::Status* missing(const char* name) { return status(std::string("there is nothing called ") + name); }

inline ort::Status* copy_text(const std::string& text, char* out, size_t* size) {
  const size_t needed = text.size() + 1;
  if (out != nullptr && *size < needed) return status("the buffer is too small");
  if (out != nullptr) std::memcpy(out, text.c_str(), needed);
  *size = needed;
  return nullptr;
}

// What most functions do: give a value, and no error.
template <class Value, class Given>
ort::Status* give(Value* out, Given value) {
  *out = value;
  return nullptr;
}
template <class To, class From>
To* as(From* from) {
  return reinterpret_cast<To*>(from);
}

inline std::vector<const ort::CustomOp*>& registered() {
  static std::vector<const ort::CustomOp*> all;
  return all;
}

template <int index, class Result, class... Arguments>
void put(std::vector<void*>& table, ort::Slot<index, Result(Arguments...)>, Result (*function)(Arguments...)) {
  table[index] = reinterpret_cast<void*>(function);
}

inline void unused() {
  std::fprintf(stderr, "a function of ONNX Runtime that this driver has not got was called\n");
  std::abort();
}

using Status = ort::Status*;
using Info = const ort::KernelInfo*;
using Context = const ort::KernelContext*;
inline const Node& node_of(Context context) { return *as<const Node>(context); }

inline Status make_output(ort::KernelContext* context, size_t index, const int64_t* sizes, size_t rank,
                          ort::Value** out) {
  Node& node = *as<Node>(context);
  *out = nullptr;
  if (!node.outputs.at(index)) return nullptr;
  auto tensor = std::make_unique<Tensor>();
  tensor->shape.assign(sizes, sizes + rank);
  if (node.fails) return status("cannot allocate an output");
  const auto bytes = static_cast<size_t>(elements(tensor->shape)) * sizeof(float);
  tensor->data = std::make_unique<unsigned char[]>(bytes);
  std::memset(tensor->data.get(), 0xff, bytes);
  node.made[index] = std::move(tensor);
  return give(out, as<ort::Value>(node.made[index].get()));
}

inline Status scratch(Context context, const ort::MemoryInfo*, size_t bytes, void** out) {
  if (node_of(context).stream == nullptr) std::abort();  // ONNX Runtime reads it without a check
  return give(out, node_of(context).arena->allocate(bytes, node_of(context).stream));
}

inline Status parallel_for(Context, void (*task)(void*, size_t), size_t count, size_t, void* data) {
  for (size_t i = 0; i < count; ++i) task(data, i);
  return nullptr;
}

inline ort::Api table() {
  static const std::vector<void*> made = [] {
    std::vector<void*> t(400, reinterpret_cast<void*>(unused));
    // clang-format off
    put(t, ort::CreateStatus(), +[](ort::ErrorCode, const char* text) { return status(text); });
    put(t, ort::GetErrorMessage(), +[](const ort::Status* s) { return as<const Message>(s)->text.c_str(); });
    put(t, ort::ReleaseStatus(), +[](Status s) { delete as<Message>(s); });
    put(t, ort::CreateCustomOpDomain(), +[](const char*, ort::CustomOpDomain** out) { return give(out, as<ort::CustomOpDomain>(new int)); });
    put(t, ort::CustomOpDomainAdd(), +[](ort::CustomOpDomain*, const ort::CustomOp* op) { registered().push_back(op); return Status(); });
    put(t, ort::AddCustomOpDomain(), +[](ort::SessionOptions*, ort::CustomOpDomain*) { return Status(); });
    put(t, ort::AttributeFloat(), +[](Info, const char* name, float*) { return missing(name); });
    put(t, ort::AttributeInt(), +[](Info info, const char* name, int64_t* out) {
      const Attribute* found = find(info, name);
      return found == nullptr || !found->text.empty() ? missing(name) : give(out, found->integer); });
    put(t, ort::AttributeString(), +[](Info info, const char* name, char* out, size_t* size) {
      return find(info, name) == nullptr ? missing(name) : copy_text(find(info, name)->text, out, size); });
    put(t, ort::InfoNodeName(), +[](Info info, char* out, size_t* size) { return copy_text(as<const Node>(info)->name, out, size); });
    put(t, ort::ContextInputCount(), +[](Context context, size_t* out) { return give(out, node_of(context).inputs.size()); });
    put(t, ort::ContextOutputCount(), +[](Context context, size_t* out) { return give(out, node_of(context).outputs.size()); });
    put(t, ort::ContextInput(), +[](Context context, size_t index, const ort::Value** out) {
      return give(out, as<const ort::Value>(node_of(context).inputs.at(index).get())); });
    put(t, ort::ContextOutput(), make_output);
    put(t, ort::GetTensorTypeAndShape(), +[](const ort::Value* value, ort::TensorInfo** out) {
      return give(out, as<ort::TensorInfo>(new Shape{as<const Tensor>(value)->shape})); });
    put(t, ort::GetDimensionsCount(), +[](const ort::TensorInfo* info, size_t* out) { return give(out, as<const Shape>(info)->sizes.size()); });
    put(t, ort::GetDimensions(), +[](const ort::TensorInfo* info, int64_t* out, size_t count) {
      std::copy_n(as<const Shape>(info)->sizes.begin(), count, out); return Status(); });
    put(t, ort::ReleaseTensorInfo(), +[](ort::TensorInfo* info) { delete as<Shape>(info); });
    put(t, ort::GetTensorMutableData(), +[](ort::Value* value, void** out) { return give(out, as<Tensor>(value)->data.get()); });
    put(t, ort::GetTensorMemoryInfo(), +[](const ort::Value* value, const ort::MemoryInfo** out) {
      return give(out, as<const ort::MemoryInfo>(&as<const Tensor>(value)->memory)); });
    put(t, ort::MemoryInfoId(), +[](const ort::MemoryInfo* info, int* out) { return give(out, as<const MemoryInfo>(info)->device); });
    put(t, ort::ContextStream(), +[](Context context, void** out) { return give(out, node_of(context).stream); });
    put(t, ort::ContextAllocator(), +[](Context context, const ort::MemoryInfo*, ort::Allocator** out) {
      return give(out, as<ort::Allocator>(node_of(context).arena)); });
    put(t, ort::ContextScratch(), scratch);
    put(t, ort::AllocatorAlloc(), +[](ort::Allocator* arena, size_t bytes, void** out) { return give(out, as<Arena>(arena)->allocate(bytes, nullptr)); });
    put(t, ort::AllocatorFree(), +[](ort::Allocator* arena, void* piece) { as<Arena>(arena)->release(piece); return Status(); });
    put(t, ort::ReleaseAllocator(), +[](ort::Allocator*) {});
    put(t, ort::ParallelFor(), parallel_for);
    // clang-format on
    return t;
  }();
  return made.data();
}

}  // namespace fake_ort
