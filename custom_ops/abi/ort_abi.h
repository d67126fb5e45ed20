// Our slice of ONNX Runtime's C ABI: the slots of OrtApi that we call and the struct OrtCustomOp.
//
// OrtApi is an append-only table of function pointers and OrtCustomOp a struct that only grows, so
// positions never change. No header of ONNX Runtime is needed to build, and the library links none of
// its code. Everything here exists since API 17 (ONNX Runtime 1.17), the version we ask for, but for what names
// a later one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kApiVersion = 17;
constexpr uint32_t kScratchApiVersion = 18;  // has ContextScratch

// Opaque types of ONNX Runtime.
struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct ShapeContext;
struct Value;
struct TensorInfo;
struct MemoryInfo;
struct Allocator;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };
enum ElementType : int { kFloat = 1, kFloat16 = 10, kDouble = 11, kBFloat16 = 16 };
enum Presence : int { kRequired = 0, kOptional = 1 };
constexpr int kDefaultMemory = 0;

using Api = void* const*;  // the table

struct ApiBase {
  Api (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// A slot of the table as a typed function: Slot<28, Status*(...)>::call(api, ...).
template <int index, class Signature>
struct Slot;
template <int index, class Result, class... Arguments>
struct Slot<index, Result(Arguments...)> {
  static Result call(Api api, Arguments... arguments) {
    return reinterpret_cast<Result (*)(Arguments...)>(api[index])(arguments...);
  }
};

struct CustomOp;

using CreateStatus = Slot<0, Status*(ErrorCode, const char*)>;
using GetErrorMessage = Slot<2, const char*(const Status*)>;
using CreateCustomOpDomain = Slot<26, Status*(const char*, CustomOpDomain**)>;
using CustomOpDomainAdd = Slot<27, Status*(CustomOpDomain*, const CustomOp*)>;
using AddCustomOpDomain = Slot<28, Status*(SessionOptions*, CustomOpDomain*)>;
using GetTensorMutableData = Slot<51, Status*(Value*, void**)>;
using GetDimensionsCount = Slot<61, Status*(const TensorInfo*, size_t*)>;
using GetDimensions = Slot<62, Status*(const TensorInfo*, int64_t*, size_t)>;
using GetSymbolicDimensions = Slot<63, Status*(const TensorInfo*, const char**, size_t)>;
using GetTensorTypeAndShape = Slot<65, Status*(const Value*, TensorInfo**)>;
using MemoryInfoId = Slot<72, Status*(const MemoryInfo*, int*)>;
using AllocatorAlloc = Slot<75, Status*(Allocator*, size_t, void**)>;
using AllocatorFree = Slot<76, Status*(Allocator*, void*)>;
using AttributeFloat = Slot<85, Status*(const KernelInfo*, const char*, float*)>;
using AttributeInt = Slot<86, Status*(const KernelInfo*, const char*, int64_t*)>;
using AttributeString = Slot<87, Status*(const KernelInfo*, const char*, char*, size_t*)>;
using ContextInputCount = Slot<88, Status*(const KernelContext*, size_t*)>;
using ContextOutputCount = Slot<89, Status*(const KernelContext*, size_t*)>;
using ContextInput = Slot<90, Status*(const KernelContext*, size_t, const Value**)>;
using ContextOutput = Slot<91, Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>;
using ReleaseStatus = Slot<93, void(Status*)>;
using ReleaseTensorInfo = Slot<99, void(TensorInfo*)>;
using ReleaseAllocator = Slot<132, void(Allocator*)>;
using AttributeInts = Slot<163, Status*(const KernelInfo*, const char*, int64_t*, size_t*)>;
using ContextStream = Slot<193, Status*(const KernelContext*, void**)>;
using GetTensorMemoryInfo = Slot<194, Status*(const Value*, const MemoryInfo**)>;
using InfoNodeName = Slot<244, Status*(const KernelInfo*, char*, size_t*)>;
using ContextAllocator = Slot<253, Status*(const KernelContext*, const MemoryInfo*, Allocator**)>;
using ShapeInput = Slot<268, Status*(const ShapeContext*, size_t, TensorInfo**)>;
using ShapeSetOutput = Slot<270, Status*(const ShapeContext*, size_t, const TensorInfo*)>;
using ParallelFor = Slot<274, Status*(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>;
// From kScratchApiVersion on. Memory that belongs to the run's stream; ONNX Runtime reads the stream without a check.
using ContextScratch = Slot<277, Status*(const KernelContext*, const MemoryInfo*, size_t, void**)>;

// Field order is the ABI of OrtCustomOp at API 17.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, Api, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*execution_provider)(const CustomOp*);
  ElementType (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  ElementType (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  Presence (*input_presence)(const CustomOp*, size_t);
  Presence (*output_presence)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*variadic_input_minimum)(const CustomOp*);
  int (*variadic_input_homogeneous)(const CustomOp*);
  int (*variadic_output_minimum)(const CustomOp*);
  int (*variadic_output_homogeneous)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, Api, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shapes)(const CustomOp*, ShapeContext*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
};
static_assert(sizeof(CustomOp) == 22 * sizeof(void*), "the ABI of OrtCustomOp, API 17");

}  // namespace ort
