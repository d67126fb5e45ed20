// The kernels that read and write tensors, two a direction. A block takes a part of a tile of channels:
//
//   moments, sums         a part's moments or sums
//   normalise, gradient   the output, a part from its end on: what the first pass read last is still in L2
//
// Moments of a batch are two passes over registers: its mean, then M2 around it. Batches are merged by
// Chan's formula, so that no choice of a pivot can spoil the result.
#pragma once

#include "places.h"

namespace bnexport::cuda {

// Vectors that a thread has in flight at a time: in the backward of each of two tensors.
template <class E>
constexpr int kForwardBatch = sizeof(typename E::Raw) == 8 ? 8 : 4;
constexpr int kBackwardBatch = 4;

// Channel k of the part in double, value by value; for values whose squares leave the range of float.
template <class Place>
BNEXPORT_DEVICE Moments wide_moments(const Place& place, const typename Place::E::Storage* x, int k) {
  using E = typename Place::E;
  const double pivot = place.inside ? static_cast<double>(E::load_one(x + place.start() + k)) : 0;
  PartSums mine;
  each<kForwardBatch<E>, false>(place, [&](const auto& batch) {
#pragma unroll
    for (int i = 0; i < batch.kVectors; ++i) {
#pragma unroll 1
      for (int j = k; j < E::kWidth; j += Place::kChannels) {
        if (batch.has(i, j)) mine.add({1, static_cast<double>(E::load_one(x + batch.offset[i] + j)), 0}, pivot);
      }
    }
  });
  return merge_threads(mine, place.lanes).moments(pivot);
}

// Moments of a batch's values, relative to `shift`.
template <class E, class Batch, class Compute, int n>
BNEXPORT_DEVICE LaneMoments<Compute, n> moments_of(const Batch& batch, const typename Batch::Values& x,
                                                   const Compute (&shift)[n]) {
  LaneMoments<Compute, n> all;
  all.count = static_cast<Compute>(batch.count() / n);
  const Compute inverse = 1 / all.count;
  const auto add_up = [&](Compute(&to)[n], const auto& term) {
#pragma unroll
    for (int i = 0; i < batch.kVectors; ++i) {
      if (!batch.has(i)) continue;
      Compute some[n] = {};  // so that a lane's chain of additions stays short
#pragma unroll
      for (int k = 0; k < E::kWidth; ++k) {
        some[k % n] += batch.has(i, k) ? term(x(i, k) - shift[k % n], k % n) : Compute(0);
      }
#pragma unroll
      for (int k = 0; k < n; ++k) to[k] += some[k];
    }
  };
  add_up(all.mean, [](Compute d, int) { return d; });
#pragma unroll
  for (int k = 0; k < n; ++k) all.mean[k] *= inverse;
  add_up(all.m2, [&](Compute d, int k) { return (d - all.mean[k]) * (d - all.mean[k]); });
  return all;
}

template <class Place>
BNEXPORT_KERNEL moments(BNEXPORT_ARGUMENTS ForwardArguments args) {
  using E = typename Place::E;
  using Compute = typename E::Compute;
  constexpr int n = Place::kChannels;
  start_next();
  const Place place(args, block_index());
  const auto* x = static_cast<const typename E::Storage*>(args.params.x);
  Compute shift[n];
  fetch_first<kForwardBatch<E>, false>(place, x);
  place.shift(x, shift);
  LaneMoments<Compute, n> all;
  each<kForwardBatch<E>, false>(place, [&](const auto& batch) {
    const auto values = batch.template load<Reuse::kSoon>(x);
    if (batch.count() != 0) all.merge(moments_of<E>(batch, values, shift));
  });
  all = merge_threads(all, place.lanes);
  const bool publishes = thread_index() < place.lanes && place.inside;
  Moments* const partials = args.partials + place.part * args.params.C + place.channel;
  bool is_wide = false;
#pragma unroll
  for (int k = 0; k < n; ++k) is_wide |= out_of_range(all.count, all.mean[k], all.m2[k]);
  if (is_true_in_first_warp(publishes && is_wide)) {
    for (int k = 0; k < n; ++k) {
      const Moments wide = wide_moments(place, x, k);
      if (publishes) partials[k] = wide;
    }
  } else if (publishes) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const double mean = static_cast<double>(shift[k]) + static_cast<double>(all.mean[k]);
      partials[k] = {static_cast<double>(all.count), mean, static_cast<double>(all.m2[k])};
    }
  }
}

// y = (x - mean) * scale + bias
template <class Place>
BNEXPORT_KERNEL normalise(BNEXPORT_ARGUMENTS ForwardArguments args) {
  using E = typename Place::E;
  using Compute = typename E::Compute;
  constexpr int n = Place::kChannels;
  const Place place(args, block_count() - 1 - block_index());
  fetch_first<kForwardBatch<E>, true>(place, args.params.x);  // while the channels are finished
  wait_for_previous();
  if (!place.inside) return;
  Compute mean[n], scale[n], bias[n];
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const ForwardCoefficients from = load_result(args.coefficients + place.channel + k);
    mean[k] = static_cast<Compute>(from.mean);
    scale[k] = static_cast<Compute>(from.scale);
    bias[k] = static_cast<Compute>(from.bias);
  }
  each<kForwardBatch<E>, true>(place, [&](const auto& batch) {
    const auto x = batch.template load<Reuse::kNever>(args.params.x);
    batch.store(args.params.y, [&](int i, int k) { return (x(i, k) - mean[k % n]) * scale[k % n] + bias[k % n]; });
  });
}

// sum dy and sum dy * x_hat. The saved statistics are read where they are needed, not held in registers meanwhile.
template <class Place>
BNEXPORT_KERNEL sums(BNEXPORT_ARGUMENTS BackwardArguments args) {
  using E = typename Place::E;
  using Compute = typename E::Compute;
  constexpr int n = Place::kChannels;
  start_next();
  const bnexport_backward& params = args.params;
  const Place place(args, block_index());
  fetch_first<kBackwardBatch, false>(place, params.dy);
  fetch_first<kBackwardBatch, false>(place, params.x);
  Compute pivot[n] = {};
#pragma unroll
  for (int k = 0; k < n; ++k) {
    if (place.inside) pivot[k] = static_cast<Compute>(saved_mean(params, place.channel + k));
  }
  LaneSums<Compute, n> all;
  each<kBackwardBatch, false>(place, [&](const auto& batch) {
    const auto dy = batch.template load<Reuse::kSoon>(params.dy), x = batch.template load<Reuse::kSoon>(params.x);
    LaneSums<Compute, n> some;
#pragma unroll
    for (int i = 0; i < batch.kVectors; ++i) {
      if (!batch.has(i)) continue;
#pragma unroll
      for (int k = 0; k < E::kWidth; ++k) {
        const Compute g = dy(i, k);  // 0 outside of the span, but x - pivot may be anything there
        some.dy[k % n] += g;
        some.dy_x[k % n] += batch.has(i, k) ? g * (x(i, k) - pivot[k % n]) : Compute(0);
      }
    }
    all.merge(some);
  });
  all = merge_threads(all, place.lanes);
  if (thread_index() < place.lanes && place.inside) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const int64_t c = place.channel + k;
      const double dy = static_cast<double>(all.dy[k]), off = saved_mean(params, c) - static_cast<double>(pivot[k]);
      args.partials[place.part * params.C + c] = {
          dy, (static_cast<double>(all.dy_x[k]) - off * dy) * saved_invstd(params, c)};
    }
  }
}

// dx = scale * ((dy - offset) - (x - mean) * slope) + rest
template <class Place>
BNEXPORT_KERNEL gradient(BNEXPORT_ARGUMENTS BackwardArguments args) {
  using E = typename Place::E;
  using Compute = typename E::Compute;
  constexpr int n = Place::kChannels;
  const Place place(args, block_count() - 1 - block_index());
  wait_for_previous();
  if (!place.inside) return;
  Compute mean[n], scale[n], offset[n], slope[n], rest[n];
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const BackwardCoefficients from = load_result(args.coefficients + place.channel + k);
    mean[k] = static_cast<Compute>(from.mean);
    scale[k] = static_cast<Compute>(from.scale);
    offset[k] = static_cast<Compute>(from.offset);
    slope[k] = static_cast<Compute>(from.slope);
    rest[k] = static_cast<Compute>(from.rest);
  }
  each<kBackwardBatch, true>(place, [&](const auto& batch) {
    const auto dy = batch.template load<Reuse::kNever>(args.params.dy),
               x = batch.template load<Reuse::kNever>(args.params.x);
    batch.store(args.params.dx, [&](int i, int k) {
      const int j = k % n;
      return ((dy(i, k) - offset[j]) - (x(i, k) - mean[j]) * slope[j]) * scale[j] + rest[j];
    });
  });
}

}  // namespace bnexport::cuda
