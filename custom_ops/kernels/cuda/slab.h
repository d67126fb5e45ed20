// Work of a block on a part of a channel's slab: moments, normalisation, gradient sums, gradient.
//
// A thread takes kBatch units at a time, blockDim apart, so that kBatch independent 16-byte loads are in
// flight per thread and a warp's accesses are consecutive.
//
// Moments of a batch are two passes over registers: its mean, then M2 around it. Batches are merged by
// Chan's formula, so that no choice of a pivot can spoil the result, for half an instruction a value more
// than sums around one pivot would take.
#pragma once

#include "elements.h"
#include "reduction.h"
#include "rows.h"
#include "saved.h"

namespace bnexport::cuda {

constexpr int kBatch = 4;

// The units index, index + blockDim, .. of a thread. `full`: all of them lie in the range and are whole.
template <class E, bool full>
struct Batch {
  uint32_t index;
  int64_t offset[kBatch];
  uint32_t mask = 0;  // of unit i, from bit i * width on

  BNEXPORT_DEVICE Batch(const Rows& rows, const Range& range, uint32_t index) : index(index) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Unit unit = unit_of_slab<E::kWidth, E::kWhole>(rows, range, index_of(i));
      offset[i] = unit.offset;
      mask |= (full ? E::kAll : unit.mask) << (i * E::kWidth);
    }
  }
  BNEXPORT_DEVICE uint32_t index_of(int i) const { return index + static_cast<uint32_t>(i * thread_count()); }
  BNEXPORT_DEVICE uint32_t mask_of(int i) const { return full ? E::kAll : mask >> (i * E::kWidth) & E::kAll; }
  BNEXPORT_DEVICE bool has(int i, int k) const { return full || (mask >> (i * E::kWidth + k) & 1) != 0; }
};

// Calls body(batch) for all batches of a thread. Full ones have a body of their own, without a mask.
template <class E, class Body>
BNEXPORT_DEVICE void for_batches(const Rows& rows, const Range& range, const Body& body) {
  const auto tile = static_cast<uint32_t>(kBatch * thread_count());
  uint32_t index = range.begin + static_cast<uint32_t>(thread_index());
  if constexpr (E::kWhole) {
    for (; index + tile - static_cast<uint32_t>(thread_count()) < range.end; index += tile) {
      body(Batch<E, true>(rows, range, index));
    }
  }
  for (; index < range.end; index += tile) body(Batch<E, false>(rows, range, index));
}

// The same from the end: what the first pass read last is what caches still hold.
template <class E, class Body>
BNEXPORT_DEVICE void for_batches_reversed(const Rows& rows, const Range& range, const Body& body) {
  const auto tile = static_cast<uint32_t>(kBatch * thread_count());
  const uint32_t first = range.begin + static_cast<uint32_t>(thread_index());
  uint32_t tiles = (range.end - range.begin + tile - 1) / tile;
  if (tiles == 0) return;
  --tiles;
  body(Batch<E, false>(rows, range, first + tiles * tile));
  while (tiles > 0) {
    --tiles;
    body(Batch<E, E::kWhole>(rows, range, first + tiles * tile));
  }
}

// Where a pass finds a tensor: in global memory, or in the shared memory it was kept in.
template <class E, Reuse reuse>
struct FromGlobal {
  const typename E::Storage* data;

  template <bool full>
  BNEXPORT_DEVICE void load(const Batch<E, full>& batch, typename E::Raw (&raw)[kBatch]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) raw[i] = E::template load<reuse>(data + batch.offset[i], batch.mask_of(i));
  }
};

// A tensor in shared memory, for both passes: the first reads global memory and keeps, the second reads
// what was kept. Threads read back only what they wrote themselves, and consecutive threads use
// consecutive 16 bytes: no barrier, no conflict.
template <class E>
struct Keeping {
  const typename E::Storage* data;
  typename E::Raw* kept;
  uint32_t begin;

  template <bool full>
  BNEXPORT_DEVICE void load(const Batch<E, full>& batch, typename E::Raw (&raw)[kBatch]) const {
    FromGlobal<E, Reuse::kNever>{data}.load(batch, raw);
    typename E::Raw* slot = kept + (batch.index - begin);
#pragma unroll
    for (int i = 0; i < kBatch; ++i, slot += thread_count()) {
      if (full || batch.mask_of(i) != 0) *slot = raw[i];
    }
  }
};
template <class E>
struct Kept {
  const typename E::Raw* kept;
  uint32_t begin;

  BNEXPORT_DEVICE explicit Kept(const Keeping<E>& from) : kept(from.kept), begin(from.begin) {}
  template <bool full>
  BNEXPORT_DEVICE void load(const Batch<E, full>& batch, typename E::Raw (&raw)[kBatch]) const {
    const typename E::Raw* slot = kept + (batch.index - begin);
#pragma unroll
    for (int i = 0; i < kBatch; ++i, slot += thread_count()) {
      raw[i] = full || batch.mask_of(i) != 0 ? *slot : typename E::Raw{};
    }
  }
};

// Adds the moments of a batch, relative to `shift`.
template <class E, bool full>
BNEXPORT_DEVICE void add_moments(LaneMoments<typename E::Compute>& all, const Batch<E, full>& batch,
                                 const typename E::Raw (&raw)[kBatch], typename E::Compute shift) {
  using Compute = typename E::Compute;
  constexpr int W = E::kWidth;
  constexpr bool kShifted = E::kSize > 2;
  Compute sums[kBatch] = {}, squares[kBatch] = {};
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
#pragma unroll
    for (int k = 0; k < W; ++k) {
      // The few values of a vector of 16-bit numbers add up exactly enough without the shift.
      const Compute d = kShifted ? E::get(raw[i], k) - shift : E::get(raw[i], k);
      sums[i] += batch.has(i, k) ? d : Compute(0);
    }
  }
  LaneMoments<Compute> part;
  part.count = full ? Compute(kBatch * W) : static_cast<Compute>(count_bits(batch.mask));
  Compute sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  // Before the division, which is not exact where a batch is not full: a large mean would leave its rounding.
  if (!kShifted) sum -= part.count * shift;
  part.mean = sum * (full ? Compute(1) / (kBatch * W) : 1 / part.count);
  // M2 around the mean as this type holds it, and the little that it is off.
  const Compute center = shift + part.mean, off = (shift - center) + part.mean;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const Compute d = batch.has(i, k) ? E::get(raw[i], k) - center : Compute(0);
      squares[i] += d * d;
    }
  }
  const Compute m2 = ((squares[0] + squares[1]) + (squares[2] + squares[3])) - part.count * off * off;
  part.m2 = m2 < 0 ? Compute(0) : m2;
  all.merge(part);
}

// The block's part in double, value by value; for values whose squares leave the range of float.
template <class E>
BNEXPORT_DEVICE Moments wide_moments(const Rows& rows, const Range& range, const typename E::Storage* x) {
  Moments all;
  for (uint32_t index = range.begin + thread_index(); index < range.end; index += thread_count()) {
    const Unit unit = unit_of_slab<E::kWidth, E::kWhole>(rows, range, index);
#pragma unroll 1
    for (int k = 0; k < E::kWidth; ++k) {
      if ((unit.mask >> k & 1) != 0) all.merge({1, static_cast<double>(E::load_one(x + unit.offset + k)), 0});
    }
  }
  return merge_block(all, Moments{});
}

// Every thread gets the moments of the part.
template <class E, class Source>
BNEXPORT_DEVICE Moments block_moments(const Rows& rows, const Range& range, const typename E::Storage* x,
                                      const Source& source) {
  using Compute = typename E::Compute;
  if (range.begin == range.end) return {};
  // Any value near the mean will do, and one of three may be far off.
  const auto* row = x + range.origin;
  const Compute shift = median(E::load_one(row), E::load_one(row + rows.S / 2), E::load_one(row + rows.S - 1));
  LaneMoments<Compute> mine{0, 0, 0};
  for_batches<E>(rows, range, [&](const auto& batch) {
    typename E::Raw raw[kBatch];
    source.load(batch, raw);
    if (batch.mask != 0) add_moments<E>(mine, batch, raw, shift);
  });
  const LaneMoments<Compute> all = merge_block(mine, LaneMoments<Compute>{0, 0, 0});
  if (out_of_range(all)) return wide_moments<E>(rows, range, x);
  return {static_cast<double>(all.count), static_cast<double>(shift) + static_cast<double>(all.mean),
          static_cast<double>(all.m2)};
}

// y = (x - mean) * scale + bias
template <class E, class Source>
BNEXPORT_DEVICE void block_normalise(const Rows& rows, const Range& range, const Source& source, typename E::Storage* y,
                                     const ForwardCoefficients& k, bool stream) {
  using Compute = typename E::Compute;
  const auto mean = static_cast<Compute>(k.mean), scale = static_cast<Compute>(k.scale);
  const auto bias = static_cast<Compute>(k.bias);
  for_batches_reversed<E>(rows, range, [&](const auto& batch) {
    typename E::Raw raw[kBatch];
    source.load(batch, raw);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      Compute value[E::kWidth];
#pragma unroll
      for (int j = 0; j < E::kWidth; ++j) value[j] = (E::get(raw[i], j) - mean) * scale + bias;
      E::store(y + batch.offset[i], E::pack(value), batch.mask_of(i), stream);
    }
  });
}

// sum dy and sum dy * x_hat of the part, for channel c; every thread gets them. The saved statistics are read
// where they are needed, not held in registers meanwhile.
template <class E, class Source>
BNEXPORT_DEVICE BlockSums block_sums(const Rows& rows, const Range& range, const Source& dy_source,
                                     const Source& x_source, const bnexport_backward& params, int64_t c) {
  using Compute = typename E::Compute;
  const auto pivot = static_cast<Compute>(saved_mean(params, c));
  LaneSums<Compute> mine{0, 0};
  for_batches<E>(rows, range, [&](const auto& batch) {
    typename E::Raw dy[kBatch], x[kBatch];
    dy_source.load(batch, dy);
    x_source.load(batch, x);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      LaneSums<Compute> unit{0, 0};  // so that a lane's chain of additions stays short
#pragma unroll
      for (int k = 0; k < E::kWidth; ++k) {
        const Compute g = E::get(dy[i], k);  // 0 where masked, but x - pivot may be anything there
        unit.dy += g;
        unit.dy_x += batch.has(i, k) ? g * (E::get(x[i], k) - pivot) : Compute(0);
      }
      mine.merge(unit);
    }
  });
  const LaneSums<Compute> all = merge_block(mine, LaneSums<Compute>{0, 0});
  const double dy = static_cast<double>(all.dy), exact = saved_mean(params, c);
  const double off = exact - static_cast<double>(static_cast<Compute>(exact));
  BlockSums sums;
  sums.dy = dy;
  sums.dy_x_hat = (static_cast<double>(all.dy_x) - off * dy) * saved_invstd(params, c);
  return sums;
}

// dx = scale * ((dy - offset) - (x - mean) * slope) + rest
template <class E, class Source>
BNEXPORT_DEVICE void block_gradient(const Rows& rows, const Range& range, const Source& dy_source,
                                    const Source& x_source, typename E::Storage* dx, const BackwardCoefficients& k,
                                    bool stream) {
  using Compute = typename E::Compute;
  const auto mean = static_cast<Compute>(k.mean), scale = static_cast<Compute>(k.scale);
  const auto offset = static_cast<Compute>(k.offset), slope = static_cast<Compute>(k.slope);
  const auto rest = static_cast<Compute>(k.rest);
  for_batches_reversed<E>(rows, range, [&](const auto& batch) {
    typename E::Raw dy[kBatch], x[kBatch];
    dy_source.load(batch, dy);
    x_source.load(batch, x);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      Compute value[E::kWidth];
#pragma unroll
      for (int j = 0; j < E::kWidth; ++j) {
        value[j] = ((E::get(dy[i], j) - offset) - (E::get(x[i], j) - mean) * slope) * scale + rest;
      }
      E::store(dx + batch.offset[i], E::pack(value), batch.mask_of(i), stream);
    }
  });
}

}  // namespace bnexport::cuda
