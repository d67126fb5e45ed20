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

constexpr int64_t kMostElements = 1 << 14;

// The number of elements; -1 where ONNX Runtime could not have made the tensor.
inline int64_t elements(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return -1;
  }
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
  int kind = 0;  // 0 absent, 1 float, 2 integer, 3 text, 4 integers, 5 another type
  float number = 0;
  int64_t integer = 0;
  std::string text;
  std::vector<int64_t> integers;
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

inline int64_t width(ort::ElementType type) { return type == ort::kDouble ? 8 : type == ort::kFloat ? 4 : 2; }

inline const Attribute* find(const ort::KernelInfo* info, const char* name) {
  for (const auto& [known, value] : reinterpret_cast<const Node*>(info)->attributes) {
    if (known == name) return value.kind == 0 ? nullptr : &value;
  }
  return nullptr;
}

inline ort::Status* wrong(const char* name) { return status(std::string("Attribute is not of this type: ") + name); }
inline ort::Status* missing(const char* name) { return status(std::string("there is nothing called ") + name); }

inline ort::Status* copy_text(const std::string& text, char* out, size_t* size) {
  const size_t needed = text.size() + 1;
  if (out == nullptr) {
    *size = needed;
    return nullptr;
  }
  if (*size < needed) return status("the buffer is too small");
  std::memcpy(out, text.c_str(), needed);
  *size = needed;
  return nullptr;
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

using Context = const ort::KernelContext*;
inline const Node& node_of(Context context) { return *reinterpret_cast<const Node*>(context); }

inline ort::Api table() {
  static const std::vector<void*> made = [] {
    std::vector<void*> t(400, reinterpret_cast<void*>(unused));
    put(t, ort::CreateStatus(), +[](ort::ErrorCode, const char* text) { return status(text); });
    put(
        t, ort::GetErrorMessage(),
        +[](const ort::Status* s) { return reinterpret_cast<const Message*>(s)->text.c_str(); });
    put(t, ort::ReleaseStatus(), +[](ort::Status* s) { delete reinterpret_cast<Message*>(s); });
    put(
        t, ort::CreateCustomOpDomain(), +[](const char*, ort::CustomOpDomain** out) -> ort::Status* {
          *out = reinterpret_cast<ort::CustomOpDomain*>(new int);
          return nullptr;
        });
    put(
        t, ort::CustomOpDomainAdd(), +[](ort::CustomOpDomain*, const ort::CustomOp* op) -> ort::Status* {
          registered().push_back(op);
          return nullptr;
        });
    put(
        t, ort::AddCustomOpDomain(),
        +[](ort::SessionOptions*, ort::CustomOpDomain*) -> ort::Status* { return nullptr; });
    put(
        t, ort::AttributeFloat(), +[](const ort::KernelInfo* info, const char* name, float* out) -> ort::Status* {
          const Attribute* found = find(info, name);
          if (found == nullptr) return missing(name);
          if (found->kind != 1) return wrong(name);
          *out = found->number;
          return nullptr;
        });
    put(
        t, ort::AttributeInt(), +[](const ort::KernelInfo* info, const char* name, int64_t* out) -> ort::Status* {
          const Attribute* found = find(info, name);
          if (found == nullptr) return missing(name);
          if (found->kind != 2) return wrong(name);
          *out = found->integer;
          return nullptr;
        });
    put(
        t, ort::AttributeString(), +[](const ort::KernelInfo* info, const char* name, char* out, size_t* size) {
          const Attribute* found = find(info, name);
          if (found == nullptr) return missing(name);
          return found->kind != 3 ? wrong(name) : copy_text(found->text, out, size);
        });
    put(
        t, ort::AttributeInts(), +[](const ort::KernelInfo* info, const char* name, int64_t* out, size_t* size) {
          const Attribute* found = find(info, name);
          if (found == nullptr) return missing(name);
          // ONNX Runtime gives an empty list for a value of another type.
          const std::vector<int64_t> none, &values = found->kind == 4 ? found->integers : none;
          if (out != nullptr) std::copy_n(values.begin(), std::min(*size, values.size()), out);
          *size = values.size();
          return static_cast<ort::Status*>(nullptr);
        });
    put(
        t, ort::InfoNodeName(), +[](const ort::KernelInfo* info, char* out, size_t* size) {
          return copy_text(reinterpret_cast<const Node*>(info)->name, out, size);
        });
    put(
        t, ort::ContextInputCount(), +[](Context context, size_t* out) -> ort::Status* {
          *out = node_of(context).inputs.size();
          return nullptr;
        });
    put(
        t, ort::ContextOutputCount(), +[](Context context, size_t* out) -> ort::Status* {
          *out = node_of(context).outputs.size();
          return nullptr;
        });
    put(
        t, ort::ContextInput(), +[](Context context, size_t index, const ort::Value** out) -> ort::Status* {
          *out = reinterpret_cast<const ort::Value*>(node_of(context).inputs.at(index).get());
          return nullptr;
        });
    put(
        t, ort::ContextOutput(),
        +[](ort::KernelContext* context, size_t index, const int64_t* sizes, size_t rank,
            ort::Value** out) -> ort::Status* {
          Node& node = *reinterpret_cast<Node*>(context);
          *out = nullptr;
          if (!node.outputs.at(index)) return nullptr;
          auto tensor = std::make_unique<Tensor>();
          tensor->shape.assign(sizes, sizes + rank);
          const int64_t count = elements(tensor->shape);
          if (node.fails || count < 0 || count > kMostElements) return status("cannot allocate an output");
          const int64_t bytes = count * width(node.op->output_type(node.op, index));
          if (bytes > 0) {
            tensor->data = std::make_unique<unsigned char[]>(static_cast<size_t>(bytes));
            std::memset(tensor->data.get(), 0xff, static_cast<size_t>(bytes));
          }
          node.made[index] = std::move(tensor);
          *out = reinterpret_cast<ort::Value*>(node.made[index].get());
          return nullptr;
        });
    put(
        t, ort::GetTensorTypeAndShape(), +[](const ort::Value* value, ort::TensorInfo** out) -> ort::Status* {
          *out = reinterpret_cast<ort::TensorInfo*>(new Shape{reinterpret_cast<const Tensor*>(value)->shape});
          return nullptr;
        });
    put(
        t, ort::GetDimensionsCount(), +[](const ort::TensorInfo* info, size_t* out) -> ort::Status* {
          *out = reinterpret_cast<const Shape*>(info)->sizes.size();
          return nullptr;
        });
    put(
        t, ort::GetDimensions(), +[](const ort::TensorInfo* info, int64_t* out, size_t count) -> ort::Status* {
          const std::vector<int64_t>& sizes = reinterpret_cast<const Shape*>(info)->sizes;
          std::copy_n(sizes.begin(), std::min(count, sizes.size()), out);
          return nullptr;
        });
    put(t, ort::ReleaseTensorInfo(), +[](ort::TensorInfo* info) { delete reinterpret_cast<Shape*>(info); });
    put(
        t, ort::GetTensorMutableData(), +[](ort::Value* value, void** out) -> ort::Status* {
          *out = reinterpret_cast<Tensor*>(value)->data.get();
          return nullptr;
        });
    put(
        t, ort::GetTensorMemoryInfo(), +[](const ort::Value* value, const ort::MemoryInfo** out) -> ort::Status* {
          if (value == nullptr) std::abort();
          *out = reinterpret_cast<const ort::MemoryInfo*>(&reinterpret_cast<const Tensor*>(value)->memory);
          return nullptr;
        });
    put(
        t, ort::MemoryInfoId(), +[](const ort::MemoryInfo* info, int* out) -> ort::Status* {
          *out = reinterpret_cast<const MemoryInfo*>(info)->device;
          return nullptr;
        });
    put(
        t, ort::ContextStream(), +[](Context context, void** out) -> ort::Status* {
          *out = node_of(context).stream;
          return nullptr;
        });
    put(
        t, ort::ContextAllocator(), +[](Context context, const ort::MemoryInfo*, ort::Allocator** out) -> ort::Status* {
          *out = reinterpret_cast<ort::Allocator*>(node_of(context).arena);
          return nullptr;
        });
    put(
        t, ort::ContextScratch(),
        +[](Context context, const ort::MemoryInfo*, size_t bytes, void** out) -> ort::Status* {
          const Node& node = node_of(context);
          if (node.stream == nullptr) std::abort();  // ONNX Runtime reads it without a check
          *out = node.arena->allocate(bytes, node.stream);
          return nullptr;
        });
    put(
        t, ort::AllocatorAlloc(), +[](ort::Allocator* arena, size_t bytes, void** out) -> ort::Status* {
          // Without an arena each piece is a block of its own, for sanitizers.
          *out = bytes > (size_t{1} << 28) ? nullptr
                 : arena == nullptr        ? std::malloc(bytes)
                                           : reinterpret_cast<Arena*>(arena)->allocate(bytes, nullptr);
          return nullptr;
        });
    put(
        t, ort::AllocatorFree(), +[](ort::Allocator* arena, void* piece) -> ort::Status* {
          if (arena == nullptr) {
            std::free(piece);
          } else {
            reinterpret_cast<Arena*>(arena)->release(piece);
          }
          return nullptr;
        });
    put(t, ort::ReleaseAllocator(), +[](ort::Allocator*) {});
    put(
        t, ort::ParallelFor(),
        +[](Context, void (*task)(void*, size_t), size_t count, size_t, void* data) -> ort::Status* {
          for (size_t i = 0; i < count; ++i) task(data, i);
          return nullptr;
        });
    return t;
  }();
  return made.data();
}

}  // namespace fake_ort
