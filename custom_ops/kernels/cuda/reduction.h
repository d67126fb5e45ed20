// From lanes to blocks: the moments of a set of values and the sums of the gradient.
//
// Lanes work in the data's compute type (float), on values relative to a shift that the whole block
// shares, so that a large mean costs no precision:
//
//   d = x - shift,   count, mean of d, M2 = sum (d - mean)^2
//
// and are merged by the formula of moments.h. Parts, one a block, are added up in double (PartSums). Every order
// is fixed: the same input gives the same bits on every run.
#pragma once

#include "../common/moments.h"
#include "../common/statistics.h"
#include "device.h"

namespace bnexport::cuda {

// In a block's shared memory: a flag, then a value for each thread.
constexpr int kSlotsAt = 16;
constexpr int kSharedBytes = kSlotsAt + kThreads * 3 * static_cast<int>(sizeof(double));

// Of `n` channels that a thread has values of.
template <class Compute, int n>
struct LaneMoments {
  Compute count = 0, mean[n] = {}, m2[n] = {};

  BNEXPORT_DEVICE void merge(const LaneMoments& other) {
    const Compute total = count + other.count;
    const Compute share = total > 0 ? divide_fast(other.count, total) : Compute(0), weight = count * share;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const Compute delta = other.mean[k] - mean[k];
      mean[k] += delta * share;
      m2[k] += other.m2[k] + delta * delta * weight;
    }
    count = total;
  }
};

template <class Compute, int n>
struct LaneSums {
  Compute dy[n] = {}, dy_x[n] = {};  // sum dy, sum dy * (x - mean)

  BNEXPORT_DEVICE void merge(const LaneSums& other) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      dy[k] += other.dy[k];
      dy_x[k] += other.dy_x[k];
    }
  }
};

// Whether M2 in float may have lost something: an overflow, or squares below the normal numbers. Equal
// values have neither mean nor M2 relative to their shift.
BNEXPORT_DEVICE bool out_of_range(float count, float mean, float m2) {
  return !(m2 < 1e34f) || (m2 < 1e-26f * count && (m2 != 0 || mean != 0));
}
BNEXPORT_DEVICE bool out_of_range(double, double, double) { return false; }

// Moments of parts around a pivot, which is the mean of one of them: no division for each. What cancels in
// second - first^2 / count is at most as many roundings as there are parts of that one's size.
struct PartSums {
  double count = 0, first = 0, second = 0;

  BNEXPORT_DEVICE void add(const Moments& part, double pivot) {
    const double d = part.mean - pivot;
    count += part.count;
    first += part.count * d;
    second += part.m2 + part.count * d * d;
  }
  BNEXPORT_DEVICE void merge(const PartSums& other) {
    count += other.count;
    first += other.first;
    second += other.second;
  }
  BNEXPORT_DEVICE Moments moments(double pivot) const {
    if (count == 0) return {};
    const double mean = first / count, m2 = second - first * mean;
    return {count, pivot + mean, m2 < 0 ? 0 : m2};
  }
};

// The gradient's sums of parts.
struct BlockSums : GradientSums {
  BNEXPORT_DEVICE void merge(const BlockSums& other) {
    dy += other.dy;
    dy_x_hat += other.dy_x_hat;
  }
};

// Threads `distance`, 2 distance, .. apart (a power of two) are merged; the first `distance` threads get the results.
// In order, whatever the timing.
template <class Value>
BNEXPORT_DEVICE Value merge_threads(Value value, int distance) {
  auto* const slots = reinterpret_cast<Value*>(shared_memory() + kSlotsAt);
  const int thread = thread_index(), lane = thread % kWarp;
  for (int above = kWarp / 2; above >= distance; above /= 2) value.merge(shuffle_down(value, above));
  sync_block();  // nobody still reads the slots
  if (lane < distance) put(slots + (distance < kWarp ? thread / kWarp * distance + lane : thread), value);
  sync_block();
  const int count = distance < kWarp ? kThreads / kWarp * distance : kThreads;
  if (thread < count) value = get(slots + thread);
  for (int half = count / 2; half >= distance; half /= 2) {
    if (thread < half) {
      value.merge(get(slots + thread + half));
      put(slots + thread, value);
    }
    sync_block();
  }
  return value;
}

struct Any {
  uint32_t is_true;
  BNEXPORT_DEVICE void merge(const Any& other) { is_true |= other.is_true; }
};

// For all threads, whether it is true in a thread of the first warp.
BNEXPORT_DEVICE bool is_true_in_first_warp(bool mine) {
  auto* const flag = reinterpret_cast<uint32_t*>(shared_memory());
  if (thread_index() < kWarp) {
    Any any{mine ? 1u : 0u};
    for (int above = kWarp / 2; above > 0; above /= 2) any.merge(shuffle_down(any, above));
    if (thread_index() == 0) put(flag, any.is_true);
  }
  sync_block();
  return get(flag) != 0;
}

}  // namespace bnexport::cuda
