// Entry points of the CPU kernels, called by the adapter and the C API. Parameters are already validated.
//
// With group_size > 1 the caller first asks for this process's row, exchanges rows, sets
// `gathered`, and then calls forward or backward. They may throw std::bad_alloc.
#pragma once

#include "../parallel.h"
#include "bnexport.h"

namespace bnexport::cpu {

void forward_row(const bnexport_forward& params, Parallel& parallel, double* row);
void forward(const bnexport_forward& params, Parallel& parallel);
void backward_row(const bnexport_backward& params, Parallel& parallel, double* row);
void backward(const bnexport_backward& params, Parallel& parallel);

}  // namespace bnexport::cpu
