// The CUDA library, opened when it lies beside this one.
//
// It needs no driver to be opened, and nothing of it runs before a node is placed on the CUDA provider.
// The environment variable BNEXPORT_CUDA_LIBRARY names another file; empty, it means none.
#pragma once

#include "bnexport_cuda.h"

namespace bnexport::adapters {

struct CudaLibrary {
  decltype(&bnexport_cuda_set_device) set_device;
  decltype(&bnexport_cuda_mark) mark;
  decltype(&bnexport_cuda_passed) passed;
  decltype(&bnexport_cuda_forward_workspace) forward_workspace;
  decltype(&bnexport_cuda_backward_workspace) backward_workspace;
  decltype(&bnexport_cuda_moments) moments;
  decltype(&bnexport_cuda_forward) forward;
  decltype(&bnexport_cuda_backward_moments) backward_moments;
  decltype(&bnexport_cuda_backward) backward;
  decltype(&bnexport_cuda_copy) copy;
};

// Null when there is none. Throws NodeError for one of another version.
const CudaLibrary* cuda_library();

}  // namespace bnexport::adapters
