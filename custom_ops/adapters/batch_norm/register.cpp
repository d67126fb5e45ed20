// RegisterCustomOps: the library's entry point for ONNX Runtime.
//
// Batch norm: four typed variants of each operator for the CPU provider, and four for the CUDA provider where
// the CUDA library is there (a session without that provider ignores them), in the domains "mmcv" and "" (old
// exports). The operators of training steps: for the CPU provider, in the domain "bnexport". A session accepts
// a domain once, so another library that also serves one of them needs it left out here: the environment
// variable BNEXPORT_DOMAINS lists the domains to register, "mmcv,ai.onnx,bnexport" unless set.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../training/operators.h"
#include "cuda_kernels.h"

namespace bnexport::adapters {

namespace {

// Tests run the CUDA operators in a CPU session, over a stand-in for the CUDA library.
#if defined(BNEXPORT_TEST_CUDA_ON_CPU)
constexpr const char* kCudaProvider = "CPUExecutionProvider";
constexpr bool kRegistersCpu = false;
#else
constexpr const char* kCudaProvider = "CUDAExecutionProvider";
constexpr bool kRegistersCpu = true;
#endif

struct Definition : ort::CustomOp {
  const schema::Operator* op;
  int32_t dtype;
  bool cuda;
  MakeKernel* make;
};

const Definition& definition(const ort::CustomOp* op) { return *static_cast<const Definition*>(op); }

ort::ElementType element_type(char kind, int32_t dtype) {
  if (kind == 'S') return dtype == BNEXPORT_FLOAT64 ? ort::kDouble : ort::kFloat;
  constexpr ort::ElementType types[] = {ort::kFloat, ort::kFloat16, ort::kBFloat16, ort::kDouble};
  return types[dtype];
}

template <class Made>
Kernel* make(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, int32_t dtype) {
  return new Made(api, info, op, dtype);
}

template <class Made, bool tags_scratch>
Kernel* make_cuda(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, int32_t dtype) {
  return new Made(api, info, op, dtype, tags_scratch);
}

ort::Status* create_kernel(const ort::CustomOp* op, ort::Api api, const ort::KernelInfo* info, void** kernel) {
  const Definition& d = definition(op);
  return guarded(api, [&] { *kernel = d.make(api, info, *d.op, d.dtype); });
}

ort::Status* compute(void* state, ort::KernelContext* context) {
  const auto* kernel = static_cast<const Kernel*>(state);
  return guarded(kernel->api(), [&] { kernel->compute(context); });
}

// The output's shape is the input's. Only that output is sure to exist, and ONNX Runtime up to 1.27
// aborts when the shape of one that does not is set; so the gradient infers nothing.
ort::Status* infer_shapes(const ort::CustomOp*, ort::ShapeContext* context);

struct Registration {
  ort::Api api = nullptr;
  std::vector<std::unique_ptr<Definition>> definitions;
  std::vector<std::pair<std::string, ort::CustomOpDomain*>> domains;
};

// ShapeContext calls come without an api; all registrations of a process share this one.
ort::Api shape_api = nullptr;

ort::Status* infer_shapes(const ort::CustomOp*, ort::ShapeContext* context) {
  const ort::Api api = shape_api;
  return guarded(api, [&] {
    ort::TensorInfo* info = nullptr;
    if (ort::Status* status = ort::ShapeInput::call(api, context, 0, &info)) {
      ort::ReleaseStatus::call(api, status);
      return;
    }
    size_t rank = 0;
    check(api, ort::GetDimensionsCount::call(api, info, &rank));
    // An unknown shape looks like a scalar here. The info belongs to the context: not ours to release.
    if (rank < 2) return;
    // ONNX Runtime writes an unknown size without a name as the symbol "", which makes all such sizes
    // of a model equal and shares buffers that differ: then the shape is better left unknown.
    std::vector<int64_t> sizes(rank);
    std::vector<const char*> symbols(rank, nullptr);
    check(api, ort::GetDimensions::call(api, info, sizes.data(), rank));
    check(api, ort::GetSymbolicDimensions::call(api, info, symbols.data(), rank));
    for (size_t i = 0; i < rank; ++i) {
      if (sizes[i] < 0 && (symbols[i] == nullptr || *symbols[i] == '\0')) return;
    }
    check(api, ort::ShapeSetOutput::call(api, context, 0, info));
  });
}

bool is_at_least(const char* version, long wanted_major, long wanted_minor) {
  char* rest = nullptr;
  const long major = std::strtol(version, &rest, 10);
  const long minor = *rest == '.' ? std::strtol(rest + 1, nullptr, 10) : 0;
  return major > wanted_major || (major == wanted_major && minor >= wanted_minor);
}

std::unique_ptr<Definition> make_definition(const schema::Operator& op, int32_t dtype, bool cuda, MakeKernel* make) {
  auto d = std::make_unique<Definition>();
  std::memset(static_cast<ort::CustomOp*>(d.get()), 0, sizeof(ort::CustomOp));
  d->op = &op;
  d->dtype = dtype;
  d->cuda = cuda;
  d->make = make;
  d->version = ort::kApiVersion;
  d->name = [](const ort::CustomOp* o) { return definition(o).op->name; };
  d->execution_provider = [](const ort::CustomOp* o) {
    return definition(o).cuda ? kCudaProvider : "CPUExecutionProvider";
  };
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
  d->create_kernel_v2 = create_kernel;
  d->compute_v2 = compute;
  d->destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  d->start_version = [](const ort::CustomOp*) { return 1; };
  d->end_version = [](const ort::CustomOp*) { return 0x7fffffff; };
  return d;
}

bool wanted(const char* domain) {
  const char* list = std::getenv("BNEXPORT_DOMAINS");
  if (list == nullptr) return true;
  const std::string name = *domain == '\0' ? "ai.onnx" : domain;
  return ("," + std::string(list) + ",").find("," + name + ",") != std::string::npos;
}

// One set of definitions per table of ONNX Runtime (one, in all but exotic processes), kept for good:
// sessions refer to it for as long as they live.
const Registration& registration(ort::Api api, const char* version) {
  static std::mutex mutex;
  static auto* const all = new std::vector<std::unique_ptr<Registration>>();
  const std::scoped_lock lock(mutex);
  for (const auto& known : *all) {
    if (known->api == api) return *known;
  }
  auto created = std::make_unique<Registration>();
  created->api = api;
  shape_api = api;
  // Up to 1.23.2 a node with an empty input in the middle crashes as soon as shapes are inferred.
  const bool shapes = is_at_least(version, 1, 24);
  const bool tags = is_at_least(version, 1, ort::kScratchApiVersion);
  MakeKernel* const cuda_forward = tags ? make_cuda<CudaForwardKernel, true> : make_cuda<CudaForwardKernel, false>;
  MakeKernel* const cuda_backward = tags ? make_cuda<CudaBackwardKernel, true> : make_cuda<CudaBackwardKernel, false>;
  std::vector<const ort::CustomOp*> batch_norm, training;
  const auto add = [&](std::vector<const ort::CustomOp*>& group, std::unique_ptr<Definition> d) {
    group.push_back(d.get());
    created->definitions.push_back(std::move(d));
  };
  for (const bool cuda : {false, true}) {
    if (cuda ? cuda_library() == nullptr : !kRegistersCpu) continue;
    for (int32_t dtype = 0; dtype < static_cast<int32_t>(schema::kForward.types.size); ++dtype) {
      auto forward = make_definition(schema::kForward, dtype, cuda, cuda ? cuda_forward : make<ForwardKernel>);
      forward->infer_shapes = shapes ? infer_shapes : nullptr;
      add(batch_norm, std::move(forward));
      add(batch_norm, make_definition(schema::kBackward, dtype, cuda, cuda ? cuda_backward : make<BackwardKernel>));
    }
  }
  for (const TrainingOperator& op : training_operators()) {
    add(training, make_definition(*op.schema, BNEXPORT_FLOAT32, false, op.make));
  }
  const auto add_domain = [&](const char* name, const std::vector<const ort::CustomOp*>& operators) {
    ort::CustomOpDomain* domain = nullptr;
    check(api, ort::CreateCustomOpDomain::call(api, name, &domain));
    for (const ort::CustomOp* op : operators) check(api, ort::CustomOpDomainAdd::call(api, domain, op));
    created->domains.emplace_back(name, domain);
  };
  for (const char* name : schema::kForward.domains) add_domain(name, batch_norm);
  add_domain(schema::kTrainingDomain, training);
  all->push_back(std::move(created));
  return *all->back();
}

}  // namespace

}  // namespace bnexport::adapters

extern "C" BNEXPORT_API ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  using namespace bnexport::adapters;
  const ort::Api api = base->GetApi(ort::kApiVersion);
  if (api == nullptr) {
    // The oldest table can still build the message.
    const ort::Api oldest = base->GetApi(1);
    if (oldest == nullptr) return nullptr;
    const std::string message = std::string("bnexport: ONNX Runtime ") + base->GetVersionString() +
                                " is too old, expected 1.17 or newer; install a newer onnxruntime";
    return ort::CreateStatus::call(oldest, ort::kNotImplemented, message.c_str());
  }
  return guarded(api, [&] {
    for (const auto& [name, domain] : registration(api, base->GetVersionString()).domains) {
      if (wanted(name.c_str())) check(api, ort::AddCustomOpDomain::call(api, options, domain));
    }
  });
}
