// Kernel arguments: the caller's parameters, the division of the tensor, and the workspace.
#pragma once

#include "../common/statistics.h"
#include "columns.h"
#include "rows.h"

namespace bnexport::cuda {

static_assert(sizeof(Moments) <= kPartBytes && sizeof(BlockSums) <= kPartBytes, "the workspace of a part");
static_assert(sizeof(BackwardCoefficients) <= kCoefficientBytes && sizeof(ForwardCoefficients) <= kCoefficientBytes,
              "the workspace of a channel");

// How kernels share out an NCS tensor.
struct Split {
  Rows rows;
  int parts = 1;            // blocks that share a channel
  int teams = 1;            // persistent kernels: channels in work at a time
  int64_t part_length = 0;  // units of a part
  bool stream = false;      // the output is larger than what L2 keeps
};

// Moments or sums of part p of channel c lie at c * channel_stride + p * part_stride.
struct Parts {
  int64_t count = 0, channel_stride = 0, part_stride = 0;
};

struct ForwardArguments {
  bnexport_forward params;  // device pointers
  Split split;
  Columns columns;
  Parts parts;
  Moments* partials = nullptr;
  ForwardCoefficients* coefficients = nullptr;
  uint32_t* arrivals = nullptr;  // one counter a team
  double* row = nullptr;         // where the statistics go when they are not finished here
};

struct BackwardArguments {
  bnexport_backward params;
  Split split;
  Columns columns;
  Parts parts;
  BlockSums* partials = nullptr;
  BackwardCoefficients* coefficients = nullptr;
  ForwardCoefficients* scales = nullptr;  // fixed statistics: dx = scale * dy, and x is not read
  uint32_t* arrivals = nullptr;
  double* row = nullptr;
};

}  // namespace bnexport::cuda
