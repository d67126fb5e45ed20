// The definitions of statistics.h, for the host (statistics.cpp) and for the device (cuda/).
//
// Host code compiles them once, in statistics.cpp, so that every way through the CPU kernels gives the
// same bits; a CUDA file includes this header and gets inline functions of its own.
#pragma once

#include <cmath>

#include "statistics.h"

#if !defined(BNEXPORT_STATISTICS)
#define BNEXPORT_STATISTICS BNEXPORT_HOST_DEVICE inline
#endif

namespace bnexport {

BNEXPORT_STATISTICS double load_statistic(const void* values, int32_t dtype, int64_t c, double absent) {
  if (values == nullptr) return absent;
  return dtype == BNEXPORT_FLOAT64 ? static_cast<const double*>(values)[c] : static_cast<const float*>(values)[c];
}

BNEXPORT_STATISTICS void store_statistic(void* values, int32_t dtype, int64_t c, double value) {
  if (values == nullptr) return;
  if (dtype == BNEXPORT_FLOAT64) {
    static_cast<double*>(values)[c] = value;
  } else {
    static_cast<float*>(values)[c] = static_cast<float>(value);
  }
}

BNEXPORT_STATISTICS double inverse_std(double variance, double eps) {
  if (variance == 0 && eps == 0) return 0;
  return 1 / std::sqrt(variance + eps);
}

BNEXPORT_STATISTICS double row_weight(int32_t stats_mode, int64_t N, int64_t S) {
  if (N == 0 || S == 0) return 0;
  if (stats_mode == BNEXPORT_STATS_EXACT) return static_cast<double>(N) * static_cast<double>(S);
  return stats_mode == BNEXPORT_STATS_DEFAULT ? 1.0 : static_cast<double>(N);
}

BNEXPORT_STATISTICS double row_spread(int32_t stats_mode, const Moments& moments) {
  if (stats_mode == BNEXPORT_STATS_EXACT || moments.count == 0) return moments.m2;
  return moments.m2 / moments.count;
}

BNEXPORT_STATISTICS GroupStatistics local_statistics(const Moments& moments) {
  GroupStatistics result;
  result.empty = moments.count == 0;
  if (result.empty) return result;
  result.mean = moments.mean;
  result.variance = moments.m2 / moments.count;
  result.count = moments.count;
  return result;
}

BNEXPORT_STATISTICS GroupStatistics gathered_statistics(const bnexport_forward& params, int64_t c) {
  const int64_t C = params.C, G = params.group_size, width = 2 * C + 1;
  const auto row = [&](int64_t r) { return params.gathered + r * width; };
  GroupStatistics result;
  double weight = 0;
  constexpr int64_t kAhead = 8;  // rows that are read before they are merged, in a thread of a GPU at the same time
  for (int64_t r = 0; r < G; ++r) weight += row(r)[0];
  if (params.stats_mode == BNEXPORT_STATS_EXACT) {
    Moments merged;
    for (int64_t first = 0; first < G; first += kAhead) {
      Moments some[kAhead];
      for (int64_t i = 0; i < kAhead && first + i < G; ++i) {
        some[i] = {row(first + i)[0], row(first + i)[1 + c], row(first + i)[1 + C + c]};
      }
      for (const Moments& one : some) merged.merge(one);
    }
    return local_statistics(merged);
  }
  // MMCV: `default` divides by G, empty processes included; `N` by the sum of the N_r.
  double mean = 0, variance = 0;
  for (int64_t r = 0; r < G; ++r) {
    if (row(r)[0] > 0) mean += row(r)[0] * row(r)[1 + c];
  }
  if (weight == 0) return result;
  const double total = params.stats_mode == BNEXPORT_STATS_DEFAULT ? static_cast<double>(G) : weight;
  mean /= total;
  for (int64_t r = 0; r < G; ++r) {
    if (!(row(r)[0] > 0)) continue;
    const double delta = row(r)[1 + c] - mean;
    variance += row(r)[0] * (row(r)[1 + C + c] + delta * delta);
  }
  result.empty = false;
  result.mean = mean;
  result.variance = variance / total;
  // MMCV counts its own values times the number of processes, so ranks differ when uneven.
  result.count = static_cast<double>(params.N) * static_cast<double>(params.S) * static_cast<double>(G);
  return result;
}

namespace {

// What the compute type of the data's loops holds of a value.
BNEXPORT_STATISTICS double held(int32_t dtype, double value) {
  return dtype == BNEXPORT_FLOAT64 ? value : static_cast<double>(static_cast<float>(value));
}

// The part of a value beyond `held`, which is nothing when the value is infinite or NaN.
BNEXPORT_STATISTICS double remainder(double value, double held_value) {
  const double rest = value - held_value;
  return rest == rest ? rest : 0;
}

BNEXPORT_STATISTICS ForwardCoefficients coefficients(const bnexport_forward& params, int64_t c, double mean,
                                                     double invstd) {
  const double weight = load_statistic(params.weight, params.stats_dtype, c, 1);
  const double bias = load_statistic(params.bias, params.stats_dtype, c, 0);
  const double scale = weight * invstd, high = held(params.dtype, mean), low = remainder(mean, high);
  return {high, scale, low == 0 ? bias : bias - low * scale};
}

BNEXPORT_STATISTICS void save(const bnexport_forward& params, int64_t c, double mean, double invstd) {
  store_statistic(params.saved_mean, saved_dtype(params), c, mean);
  store_statistic(params.saved_invstd, saved_dtype(params), c, invstd);
}

}  // namespace

BNEXPORT_STATISTICS ForwardCoefficients finish_training(const bnexport_forward& params, int64_t c,
                                                        const GroupStatistics& statistics) {
  const auto update = [&](const void* old_values, void* new_values, double value) {
    if (old_values == nullptr || new_values == nullptr) return;
    const double old_value = load_statistic(old_values, params.stats_dtype, c, 0);
    // With every process empty there is nothing to learn from: the statistics stay as they are.
    const double mixed = statistics.empty ? old_value : (1 - params.momentum) * old_value + params.momentum * value;
    store_statistic(new_values, params.stats_dtype, c, mixed);
  };
  const double unbiased = statistics.count > 1 ? statistics.count / (statistics.count - 1) : 1.0;
  update(params.running_mean, params.running_mean_out, statistics.mean);
  update(params.running_var, params.running_var_out, statistics.variance * unbiased);
  const double invstd = inverse_std(statistics.variance, params.eps);
  save(params, c, statistics.mean, invstd);
  return coefficients(params, c, statistics.mean, invstd);
}

BNEXPORT_STATISTICS ForwardCoefficients finish_inference(const bnexport_forward& params, int64_t c) {
  const double mean = load_statistic(params.running_mean, params.stats_dtype, c, 0);
  const double variance = load_statistic(params.running_var, params.stats_dtype, c, 1);
  store_statistic(params.running_mean_out, params.stats_dtype, c, mean);
  store_statistic(params.running_var_out, params.stats_dtype, c, variance);
  const double invstd = inverse_std(variance, params.eps);
  save(params, c, mean, invstd);
  return coefficients(params, c, mean, invstd);
}

BNEXPORT_STATISTICS GroupShare group_share(const bnexport_backward& params) {
  const auto N = static_cast<double>(params.N), S = static_cast<double>(params.S);
  GroupShare share;
  if (params.N == 0 || params.S == 0) return share;  // no value of this process asks for it
  if (params.group_size == 1) {
    share.lambda = 1 / (N * S);
    return share;
  }
  const int64_t G = params.group_size, width = 2 * params.C + 1;
  double weight = 0;
  for (int64_t r = 0; r < G; ++r) weight += params.gathered[r * width];
  if (params.stats_mode == BNEXPORT_STATS_EXACT) {
    share.lambda = 1 / weight;
  } else if (params.stats_mode == BNEXPORT_STATS_DEFAULT) {
    share.lambda = 1 / (static_cast<double>(G) * N * S);
    share.non_empty = weight / static_cast<double>(G);
  } else {
    share.lambda = 1 / (S * weight);
  }
  return share;
}

namespace {

BNEXPORT_STATISTICS GradientSums group_sums(const bnexport_backward& params, int64_t c, const GradientSums& local) {
  if (params.group_size == 1 || params.gathered == nullptr) return local;
  const int64_t C = params.C, width = 2 * C + 1;
  GradientSums total;
  for (int64_t r = 0; r < params.group_size; ++r) {
    total.dy += params.gathered[r * width + 1 + c];
    total.dy_x_hat += params.gathered[r * width + 1 + C + c];
  }
  return total;
}

BNEXPORT_STATISTICS void write_gradients(const bnexport_backward& params, int64_t c, const GradientSums& local) {
  double factor = 1;
  if (params.grad_reduction == BNEXPORT_GRAD_MEAN) factor = 1 / static_cast<double>(params.group_size);
  const bool keep_local = params.grad_reduction == BNEXPORT_GRAD_LOCAL;
  const GradientSums reduced = keep_local ? local : group_sums(params, c, local);
  store_statistic(params.dweight, params.stats_dtype, c, reduced.dy_x_hat * factor);
  store_statistic(params.dbias, params.stats_dtype, c, reduced.dy * factor);
}

// With m the group's mean, v its variance, A = sum dy and B = sum dy x_hat over the group:
//
//   dx = w invstd (dy - A dm/dx - (B invstd / 2) dv/dx),   dm/dx = lambda
//
// In the modes exact and N, sum over ranks of weight_r (mean_r - m) is 0, so dv/dx = 2 lambda (x - m).
// In `default` m = (1/G) sum of mean_r over the k G non-empty ranks, hence sum (mean_r - m) =
// (1 - k) G m, and v depends on x through m as well: dv/dm = -2 (1 - k) m. Then
//
//   dv/dx = 2 lambda ((x - m) - (1 - k) m)
//   dx = w invstd (dy - lambda (A' + x_hat B)),   A' = A - (1 - k) invstd m B
BNEXPORT_STATISTICS BackwardCoefficients backward_coefficients(const bnexport_backward& params, int64_t c,
                                                               const GradientSums& local, const GroupShare& share) {
  const double mean = load_statistic(params.saved_mean, saved_dtype(params), c, 0);
  const double invstd = load_statistic(params.saved_invstd, saved_dtype(params), c, 0);
  const double scale = load_statistic(params.weight, params.stats_dtype, c, 1) * invstd;
  if (!params.training) return {0, scale, 0, 0, 0};
  const GradientSums total = group_sums(params, c, local);
  double dy_sum = total.dy;
  if (share.non_empty < 1) dy_sum -= (1 - share.non_empty) * invstd * mean * total.dy_x_hat;
  const double offset = share.lambda * dy_sum, slope = share.lambda * total.dy_x_hat * invstd;
  const double mean_high = held(params.dtype, mean), offset_high = held(params.dtype, offset);
  const double rest = scale * (remainder(mean, mean_high) * slope - remainder(offset, offset_high));
  return {mean_high, scale, offset_high, slope, rest};
}

}  // namespace

BNEXPORT_STATISTICS BackwardCoefficients finish_backward(const bnexport_backward& params, int64_t c,
                                                         const GradientSums& local, const GroupShare& share) {
  write_gradients(params, c, local);
  return backward_coefficients(params, c, local, share);
}

}  // namespace bnexport
