// The forward's statistics as the backward reads them.
#pragma once

#include "../common/statistics_definitions.h"
#include "device.h"

namespace bnexport::cuda {

BNEXPORT_DEVICE double saved_mean(const bnexport_backward& params, int64_t c) {
  return load_statistic(params.saved_mean, saved_dtype(params), c, 0);
}
BNEXPORT_DEVICE double saved_invstd(const bnexport_backward& params, int64_t c) {
  return load_statistic(params.saved_invstd, saved_dtype(params), c, 0);
}

}  // namespace bnexport::cuda
