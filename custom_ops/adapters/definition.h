// Operator definitions for ONNX Runtime, made from the schemas.
#pragma once

#include <functional>
#include <memory>

#include "node.h"

namespace bnexport::adapters {

// Makes the kernel of one node.
using MakeKernel = Kernel*(Node node);
template <class Made>
Kernel* make(Node node) {
  return new Made(std::move(node));
}

// `api`: the table of the ONNX Runtime that it is registered with; a process may have two.
struct Definition : ort::CustomOp {
  ort::Api api;
  const schema::Operator* op;
  int32_t dtype;
  const char* provider;
  MakeKernel* make;
};

std::unique_ptr<Definition> define(ort::Api api, const schema::Operator& op, int32_t dtype, const char* provider,
                                   MakeKernel* make);

// The functions of OrtCustomOp, for kernels of ours.
ort::Status* create_kernel(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, int32_t dtype,
                           MakeKernel* make, void** kernel);
ort::Status* compute_kernel(void* kernel, ort::KernelContext* context);
void destroy_kernel(void* kernel);

// The body of a library's RegisterCustomOps, whose errors become a status, as does an ONNX Runtime that is too old.
ort::Status* registered(const ort::ApiBase* base, const std::function<void(ort::Api)>& body);

}  // namespace bnexport::adapters
