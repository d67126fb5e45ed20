#include "definition.h"

#include <cstring>

#include "bnexport.h"

namespace bnexport::adapters {

namespace {

const Definition& definition(const ort::CustomOp* op) { return *static_cast<const Definition*>(op); }

ort::ElementType element_type(char kind, int32_t dtype) {
  if (kind == 'S') return dtype == BNEXPORT_FLOAT64 ? ort::kDouble : ort::kFloat;
  constexpr ort::ElementType types[] = {ort::kFloat, ort::kFloat16, ort::kBFloat16, ort::kDouble};
  return types[dtype];
}

}  // namespace

std::unique_ptr<Definition> define(ort::Api api, const schema::Operator& op, int32_t dtype, const char* provider,
                                   MakeKernel* make) {
  auto d = std::make_unique<Definition>();
  std::memset(static_cast<ort::CustomOp*>(d.get()), 0, sizeof(ort::CustomOp));
  d->api = api;
  d->op = &op;
  d->dtype = dtype;
  d->provider = provider;
  d->make = make;
  d->version = ort::kApiVersion;
  d->name = [](const ort::CustomOp* o) { return definition(o).op->name; };
  d->execution_provider = [](const ort::CustomOp* o) { return definition(o).provider; };
  d->input_type = [](const ort::CustomOp* o, size_t i) {
    return element_type(definition(o).op->inputs[i].type, definition(o).dtype);
  };
  d->output_type = [](const ort::CustomOp* o, size_t i) {
    return element_type(definition(o).op->outputs[i].type, definition(o).dtype);
  };
  d->input_count = [](const ort::CustomOp* o) { return definition(o).op->inputs.size; };
  d->output_count = [](const ort::CustomOp* o) { return definition(o).op->outputs.size; };
  d->input_presence = [](const ort::CustomOp* o, size_t i) {
    return definition(o).op->inputs[i].optional ? ort::kOptional : ort::kRequired;
  };
  d->output_presence = [](const ort::CustomOp* o, size_t i) {
    return definition(o).op->outputs[i].optional ? ort::kOptional : ort::kRequired;
  };
  d->input_memory = [](const ort::CustomOp*, size_t) { return ort::kDefaultMemory; };
  const auto zero = [](const ort::CustomOp*) { return 0; };
  d->variadic_input_minimum = zero;
  d->variadic_input_homogeneous = zero;
  d->variadic_output_minimum = zero;
  d->variadic_output_homogeneous = zero;
  d->create_kernel_v2 = [](const ort::CustomOp* o, ort::Api api, const ort::KernelInfo* info, void** kernel) {
    return create_kernel(api, info, *definition(o).op, definition(o).dtype, definition(o).make, kernel);
  };
  d->compute_v2 = compute_kernel;
  d->destroy = destroy_kernel;
  d->start_version = [](const ort::CustomOp*) { return 1; };
  d->end_version = [](const ort::CustomOp*) { return 0x7fffffff; };
  return d;
}

ort::Status* create_kernel(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, int32_t dtype,
                           MakeKernel* make, void** kernel) {
  return guarded(api, [&] { *kernel = make(Node(api, info, op, dtype)); });
}

ort::Status* compute_kernel(void* kernel, ort::KernelContext* context) {
  const auto* const made = static_cast<const Kernel*>(kernel);
  return guarded(made->api(), [&] { made->run(context); });
}

void destroy_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

ort::Status* registered(const ort::ApiBase* base, const std::function<void(ort::Api)>& body) {
  const ort::Api api = base->GetApi(ort::kApiVersion);
  if (api != nullptr) return guarded(api, [&] { body(api); });
  // The oldest table can still build the message.
  const ort::Api oldest = base->GetApi(1);
  if (oldest == nullptr) return nullptr;
  const std::string message = std::string("bnexport: ONNX Runtime ") + base->GetVersionString() +
                              " is too old, expected 1.17 or newer; install a newer onnxruntime";
  return ort::CreateStatus::call(oldest, ort::kNotImplemented, message.c_str());
}

}  // namespace bnexport::adapters
