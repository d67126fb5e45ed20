// What a channel's statistics mean for the group: merging rows, running statistics, coefficients.
//
// Everything here is per channel, in double, and knows nothing of how the data was read. Host and device
// share the definitions (statistics_definitions.h).
#pragma once

#include <cstdint>

#include "bnexport.h"
#include "moments.h"

namespace bnexport {

// y = (x - mean) * scale + bias
//
// Loops compute in the data's compute type (float, or double for double data). finish_* split the mean
// and the offset into what that type holds and the rest; the rest is so small that it can join the
// additive term without cancellation, so that x - mean is as good as in double.
struct ForwardCoefficients {
  double mean, scale, bias;
};

// dx = scale * ((dy - offset) - (x - mean) * slope) + rest
struct BackwardCoefficients {
  double mean, scale, offset, slope, rest;
};

// The batch statistics of the group. `count` is the one that the unbiased running variance uses.
struct GroupStatistics {
  double mean = 0, variance = 0, count = 0;
  bool empty = true;
};

// sum dy and sum dy * x_hat of one channel.
struct GradientSums {
  double dy = 0, dy_x_hat = 0;
};

BNEXPORT_HOST_DEVICE double load_statistic(const void* values, int32_t dtype, int64_t c, double absent);
BNEXPORT_HOST_DEVICE void store_statistic(void* values, int32_t dtype, int64_t c, double value);

// The type of saved_mean and saved_invstd.
template <class Params>
BNEXPORT_HOST_DEVICE inline int32_t saved_dtype(const Params& params) {
  return params.saved_as_statistics != 0 ? params.stats_dtype : static_cast<int32_t>(BNEXPORT_FLOAT64);
}

// 1 / sqrt(variance + eps), and 0 where both are 0, as torch does on a CPU.
BNEXPORT_HOST_DEVICE double inverse_std(double variance, double eps);

// This process's weight in a row, and the row's entries for a channel; see bnexport.h.
BNEXPORT_HOST_DEVICE double row_weight(int32_t stats_mode, int64_t N, int64_t S);
BNEXPORT_HOST_DEVICE double row_spread(int32_t stats_mode, const Moments& moments);

// Statistics of one process (`moments`), or of the group (params.gathered) when group_size > 1.
BNEXPORT_HOST_DEVICE GroupStatistics local_statistics(const Moments& moments);
BNEXPORT_HOST_DEVICE GroupStatistics gathered_statistics(const bnexport_forward& params, int64_t c);

// Writes running and saved statistics of channel c and returns the coefficients of its output.
BNEXPORT_HOST_DEVICE ForwardCoefficients finish_training(const bnexport_forward& params, int64_t c,
                                                         const GroupStatistics& statistics);
BNEXPORT_HOST_DEVICE ForwardCoefficients finish_inference(const bnexport_forward& params, int64_t c);

// What the rows of the group (or the local sums) add up to for every channel alike.
struct GroupShare {
  double lambda = 0;     // weight of one value of this process in the group's mean
  double non_empty = 1;  // k = (processes with data) / G, below 1 only counts in stats_mode default
};
BNEXPORT_HOST_DEVICE GroupShare group_share(const bnexport_backward& params);

// Writes dweight and dbias of channel c and returns the coefficients of dx.
BNEXPORT_HOST_DEVICE BackwardCoefficients finish_backward(const bnexport_backward& params, int64_t c,
                                                          const GradientSums& local, const GroupShare& share);

}  // namespace bnexport
