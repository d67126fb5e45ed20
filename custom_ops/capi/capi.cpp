// The C API of bnexport.h: validation, then the kernels, in threads that the program lends.
#include <memory>
#include <string>

#include "../comm/group.h"
#include "../kernels/cpu/batch_norm/kernels.h"
#include "../kernels/cpu/openmp.h"
#include "../kernels/cpu/processor.h"
#include "../schema/batch_norm.h"
#include "../schema/training.h"
#include "bnexport.h"
#include "validation.h"

namespace {

using namespace bnexport;
using namespace bnexport::capi;

template <class Params>
void validate_for_cpu(const Params* params, bool row_only) {
  validate(params, row_only);
  require_range("params.saved_as_statistics (1 on CUDA devices alone)", params->saved_as_statistics, 0, 0);
  require_range("params.threads", params->threads, 1, 1024);
}

}  // namespace

extern "C" {

uint32_t bnexport_abi_version(void) { return BNEXPORT_ABI_VERSION; }
const char* bnexport_version(void) { return BNEXPORT_VERSION; }
const char* bnexport_describe(void) {
  static const std::string json = [] {
    std::string made = "{\"operators\": [" + describe(schema::kForward) + ", " + describe(schema::kBackward);
    for (const schema::Operator& op : schema::kTrainingOperators) made += ", " + describe(op);
    return made + "]}";
  }();
  return json.c_str();
}
const char* bnexport_instruction_set(void) { return cpu::instruction_set_name(); }
void bnexport_lend_openmp(void* gomp_parallel) {
  cpu::lend_openmp(reinterpret_cast<cpu::OpenMpParallel>(gomp_parallel));
}

int bnexport_cpu_moments(const bnexport_forward* params, double* row, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    validate_for_cpu(params, true);
    require_pointer("row", row);
    cpu::OpenMpThreads threads(params->threads);
    cpu::forward_row(*params, threads, row);
  });
}

int bnexport_cpu_forward(const bnexport_forward* params, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    validate_for_cpu(params, false);
    bnexport_forward checked = *params;
    if (!checked.training) checked.group_size = 1;  // nothing is exchanged
    cpu::OpenMpThreads threads(params->threads);
    cpu::forward(checked, threads);
  });
}

int bnexport_cpu_backward_moments(const bnexport_backward* params, double* row, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    validate_for_cpu(params, true);
    require_pointer("row", row);
    cpu::OpenMpThreads threads(params->threads);
    cpu::backward_row(*params, threads, row);
  });
}

int bnexport_cpu_backward(const bnexport_backward* params, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    validate_for_cpu(params, false);
    bnexport_backward checked = *params;
    if (!checked.training && checked.grad_reduction == BNEXPORT_GRAD_LOCAL) checked.group_size = 1;
    cpu::OpenMpThreads threads(params->threads);
    cpu::backward(checked, threads);
  });
}

int bnexport_register_group(const char* name, int64_t size, int64_t rank, bnexport_all_gather all_gather, void* context,
                            char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    require_pointer("name", name);
    require_range("size", size, 1, 1000000);
    require_range("rank", rank, 0, size - 1);
    if (all_gather == nullptr) refuse("all_gather", "NULL", "a function");
    comm::add_group(name, std::make_shared<const comm::Group>(name, size, rank, all_gather, context));
  });
}

int bnexport_unregister_group(const char* name, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    require_pointer("name", name);
    if (!comm::remove_group(name)) refuse("group", std::string("'") + name + "'", "the name of a registered group");
  });
}

}  // extern "C"
