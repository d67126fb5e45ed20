// How libbnexport_training.so serves the nodes that libbnexport_ops.so declares: a session accepts a domain from one
// library alone, so the operators' library has the domain "bnexport" and says what to register where its kernels are
// not there. Both libraries are of one version, which is compared, so this is no interface that has to last.
#pragma once

#include "../abi/ort_abi.h"
#include "bnexport.h"

namespace bnexport::adapters {

struct TrainingKernels {
  // As OrtCustomOp's; `index` is the operator's in schema::kTrainingOperators.
  ort::Status* (*create)(size_t index, ort::Api api, const ort::KernelInfo* info, void** kernel);
  ort::Status* (*compute)(void* kernel, ort::KernelContext* context);
  void (*destroy)(void* kernel);
};

// Of the training library.
const TrainingKernels& training_kernels();

}  // namespace bnexport::adapters

// Of the operators' library: nodes of the domain "bnexport" run in these kernels from now on, in any session.
extern "C" BNEXPORT_API void bnexport_lend_training(const bnexport::adapters::TrainingKernels* kernels);
