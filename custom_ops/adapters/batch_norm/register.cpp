// RegisterCustomOps: the entry point of libbnexport_ops.so for ONNX Runtime.
//
// Batch norm: four typed variants of each operator for the CPU provider, and four for the CUDA provider where
// the CUDA library is there (a session without that provider ignores them), in the domains "mmcv" and "" (old
// exports). The operators of training steps are declared for the CPU provider, in the domain "bnexport"; their kernels
// are the training library's. A session accepts a domain once, so another library that also serves one of them needs
// it left out here: the environment variable BNEXPORT_DOMAINS lists the domains to register,
// "mmcv,ai.onnx,bnexport" unless set.
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "../../schema/batch_norm.h"
#include "../../schema/training.h"
#include "../definition.h"
#include "../training_library.h"
#include "cuda_kernels.h"

namespace bnexport::adapters {

namespace {

constexpr const char* kCpuProvider = "CPUExecutionProvider";
// Tests run the CUDA operators in a CPU session, over a stand-in for the CUDA library.
#if defined(BNEXPORT_TEST_CUDA_ON_CPU)
constexpr const char* kCudaProvider = kCpuProvider;
constexpr bool kRegistersCpu = false;
#else
constexpr const char* kCudaProvider = "CUDAExecutionProvider";
constexpr bool kRegistersCpu = true;
#endif

std::atomic<const TrainingKernels*> lent{nullptr};

ort::Status* create_lent(const ort::CustomOp* op, ort::Api api, const ort::KernelInfo* info, void** kernel) {
  const schema::Operator* const declared = static_cast<const Definition*>(op)->op;
  if (const TrainingKernels* const kernels = lent) {
    return kernels->create(static_cast<size_t>(declared - schema::kTrainingOperators), api, info, kernel);
  }
  return guarded(api, [&] {
    throw NodeError(
        Node(api, info, *declared, BNEXPORT_FLOAT32).where +
        ": the kernels of training steps are not registered, expected those of libbnexport_training.so; call "
        "bnexport.register(session_options, training=True) or use bnexport.TrainingSession, and without "
        "Python register that library, too");
  });
}

struct Registration {
  ort::Api api = nullptr;
  std::vector<std::unique_ptr<Definition>> definitions;
  std::vector<std::pair<std::string, ort::CustomOpDomain*>> domains;
};

// The output's shape is the input's. Only that output is sure to exist, and ONNX Runtime up to 1.27
// aborts when the shape of one that does not is set; so the gradient infers nothing.
ort::Status* infer_shapes(const ort::CustomOp* op, ort::ShapeContext* context) {
  const ort::Api api = static_cast<const Definition*>(op)->api;
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
  // Up to 1.23.2 a node with an empty input in the middle crashes as soon as shapes are inferred.
  const bool shapes = is_at_least(version, 1, 24);
  // Scratch memory that belongs to a stream.
  const bool has_cuda = is_at_least(version, 1, ort::kScratchApiVersion) && cuda_library() != nullptr;
  std::vector<const ort::CustomOp*> batch_norm, training;
  const auto add = [&](std::vector<const ort::CustomOp*>& group, std::unique_ptr<Definition> d) {
    group.push_back(d.get());
    created->definitions.push_back(std::move(d));
  };
  for (const bool cuda : {false, true}) {
    if (cuda ? !has_cuda : !kRegistersCpu) continue;
    for (int32_t dtype = 0; dtype < static_cast<int32_t>(schema::kForward.types.size); ++dtype) {
      const char* const provider = cuda ? kCudaProvider : kCpuProvider;
      auto forward =
          define(api, schema::kForward, dtype, provider, cuda ? make<CudaKernel<ForwardBinding>> : make<ForwardKernel>);
      forward->infer_shapes = shapes ? infer_shapes : nullptr;
      add(batch_norm, std::move(forward));
      add(batch_norm, define(api, schema::kBackward, dtype, provider,
                             cuda ? make<CudaKernel<BackwardBinding>> : make<BackwardKernel>));
    }
  }
  for (const schema::Operator& op : schema::kTrainingOperators) {
    auto declared = define(api, op, BNEXPORT_FLOAT32, kCpuProvider, nullptr);
    declared->create_kernel_v2 = create_lent;
    declared->compute_v2 = [](void* kernel, ort::KernelContext* context) {
      return lent.load()->compute(kernel, context);
    };
    declared->destroy = [](void* kernel) { lent.load()->destroy(kernel); };
    add(training, std::move(declared));
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
  return registered(base, [&](ort::Api api) {
    for (const auto& [name, domain] : registration(api, base->GetVersionString()).domains) {
      if (wanted(name.c_str())) check(api, ort::AddCustomOpDomain::call(api, options, domain));
    }
  });
}

extern "C" BNEXPORT_API void bnexport_lend_training(const bnexport::adapters::TrainingKernels* kernels) {
  // The first ones stay: sessions have kernels of theirs.
  const bnexport::adapters::TrainingKernels* none = nullptr;
  bnexport::adapters::lent.compare_exchange_strong(none, kernels);
}
