// The CUDA library, opened when it lies beside this one.
//
// It needs no driver to be opened, and nothing of it runs before a node is placed on the CUDA provider.
// The environment variable BNEXPORT_CUDA_LIBRARY names another file; empty, it means none.
#pragma once

#include "bnexport_cuda.h"

// The functions that the adapters call.
#define BNEXPORT_CUDA_FUNCTIONS(each)                                                                      \
  each(set_device) each(wait) each(forward_workspace) each(backward_workspace) each(moments) each(forward) \
      each(backward_moments) each(backward) each(copy)

namespace bnexport::adapters {

struct CudaLibrary {
#define BNEXPORT_DECLARE(name) decltype(&bnexport_cuda_##name) name = nullptr;
  BNEXPORT_CUDA_FUNCTIONS(BNEXPORT_DECLARE)
#undef BNEXPORT_DECLARE
};

// Null when there is none. Throws NodeError for one of another version.
const CudaLibrary* cuda_library();

}  // namespace bnexport::adapters
