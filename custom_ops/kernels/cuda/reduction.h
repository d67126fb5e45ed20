// From lanes to blocks: the moments of a set of values and the sums of the gradient.
//
// Lanes work in the data's compute type (float), on values relative to a shift that the whole block
// shares, so that a large mean costs no precision:
//
//   d = x - shift,   count, mean of d, M2 = sum (d - mean)^2
//
// and are merged by the formula of moments.h. A block's result leaves as Moments in double. Every order
// is fixed: the same input gives the same bits on every run.
#pragma once

#include "../common/moments.h"
#include "../common/statistics.h"
#include "device.h"
#include "limits.h"

namespace bnexport::cuda {

template <class Compute>
struct LaneMoments {
  Compute count, mean, m2;

  BNEXPORT_DEVICE void merge(const LaneMoments& other) {
    const Compute total = count + other.count;
    const Compute share = total > 0 ? divide_fast(other.count, total) : Compute(0);
    const Compute delta = other.mean - mean;
    mean += delta * share;
    m2 += other.m2 + delta * delta * count * share;
    count = total;
  }
};

template <class Compute>
BNEXPORT_DEVICE Compute median(Compute a, Compute b, Compute c) {
  const Compute low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

// Whether M2 in float may have lost something: an overflow, or squares below the normal numbers. Equal
// values have neither mean nor M2 relative to its shift.
BNEXPORT_DEVICE bool out_of_range(const LaneMoments<float>& m) {
  return !(m.m2 < 1e34f) || (m.m2 < 1e-26f * m.count && (m.m2 != 0 || m.mean != 0));
}
BNEXPORT_DEVICE bool out_of_range(const LaneMoments<double>&) { return false; }

template <class Compute>
struct LaneSums {
  Compute dy, dy_x;  // sum dy, sum dy * (x - mean)

  BNEXPORT_DEVICE void merge(const LaneSums& other) {
    dy += other.dy;
    dy_x += other.dy_x;
  }
};

// The sums in double, between blocks; as Moments is for the statistics.
struct BlockSums : GradientSums {
  BNEXPORT_DEVICE void merge(const BlockSums& other) {
    dy += other.dy;
    dy_x_hat += other.dy_x_hat;
  }
};

// The first bytes of every block's shared memory.
struct Scratch {
  double warps[kWarp * 3];            // one value a warp
  double result[5];                   // of the block, or coefficients for all threads
  double ranks[kLargestCluster * 3];  // one value a block of the cluster
  static BNEXPORT_DEVICE Scratch& get() { return *reinterpret_cast<Scratch*>(shared_memory()); }
};
static_assert(sizeof(Scratch) <= kScratchBytes, "scratch");

// Lane 0 gets the merge of the first `lanes` (a power of two) lanes; in order, whatever the timing.
template <class Value>
BNEXPORT_DEVICE Value merge_lanes(Value value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) value.merge(shuffle_down(value, distance));
  return value;
}

// Every thread gets the merge of the whole block's values. `none` is the value of no data.
template <class Value>
BNEXPORT_DEVICE Value merge_block(Value value, const Value& none) {
  static_assert(sizeof(Value) <= 3 * sizeof(double), "fits the scratch");
  Scratch& scratch = Scratch::get();
  auto* warps = reinterpret_cast<Value*>(scratch.warps);
  auto* result = reinterpret_cast<Value*>(scratch.result);
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, count = thread_count() / kWarp;
  int lanes = 1;
  while (lanes < count) lanes *= 2;
  value = merge_lanes(value, kWarp);
  if (lane == 0) warps[warp] = value;
  sync_block();
  if (warp == 0) {
    value = merge_lanes(lane < count ? warps[lane] : none, lanes);
    if (lane == 0) *result = value;
  }
  sync_block();
  return *result;
}

// One thread's value for all of the block.
template <class Value>
BNEXPORT_DEVICE Value broadcast(const Value& value) {
  static_assert(sizeof(Value) <= sizeof(Scratch::result), "fits the scratch");
  auto* result = reinterpret_cast<Value*>(Scratch::get().result);
  sync_block();  // nobody still reads the last one
  if (thread_index() == 0) *result = value;
  sync_block();
  return *result;
}

// Lanes of a warp share out `count` values, `stride` apart in global memory; lane 0 gets their merge.
template <class Value>
BNEXPORT_DEVICE Value merge_parts(const Value* parts, int64_t count, int64_t stride, const Value& none) {
  constexpr int kDoubles = sizeof(Value) / sizeof(double);
  Value all = none;
  for (int64_t i = thread_index() % kWarp; i < count; i += kWarp) {
    const auto* from = reinterpret_cast<const double*>(parts + i * stride);
    Value part;
    auto* to = reinterpret_cast<double*>(&part);
#pragma unroll
    for (int k = 0; k < kDoubles; ++k) to[k] = load_shared_between_blocks(from + k);
    all.merge(part);
  }
  return merge_lanes(all, kWarp);
}

// The merge of what the blocks of a cluster hold (each in all its threads), for thread 0 of each block.
// A cluster's kernel begins with cluster_arrive.
template <class Value>
BNEXPORT_DEVICE Value merge_cluster(const Value& mine, const Value& none) {
  static_assert(sizeof(Value) <= 3 * sizeof(double), "fits the scratch");
  const int ranks = cluster_size();
  if (ranks == 1) return mine;
  auto* slots = reinterpret_cast<Value*>(Scratch::get().ranks);
  // Every block runs by now, so its shared memory may be written: matches the arrive at the start.
  cluster_wait();
  if (thread_index() < ranks) *in_block(slots + cluster_rank(), thread_index()) = mine;
  cluster_arrive();
  cluster_wait();
  Value all = none;
  if (thread_index() < kWarp) {
    all = merge_lanes(thread_index() < ranks ? slots[thread_index()] : none, ranks);
  }
  return all;
}

}  // namespace bnexport::cuda
