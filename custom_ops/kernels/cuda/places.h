// A block's place in a tensor: a part of a tile of channels, and its values as batches of vectors.
//
//   RowPlace      NCS: one channel, a part of its slab
//   ColumnPlace   NSC, and NCS with one pixel: a matrix of N * S rows and C columns, one channel each. A block is
//                 `lanes` threads wide and kThreads / lanes high; a thread takes one vector of columns
//
// A part has `length` vectors for the threads of a channel; this thread takes vector `offset` and every `step`-th
// behind it, a batch of them at a time, so that as many independent loads are in flight and a warp's accesses are
// consecutive. It has values of kChannels channels, element k of a vector of channel k % kChannels; threads a multiple
// of `lanes` apart have the same channels.
#pragma once

#include "channels.h"
#include "elements.h"

namespace bnexport::cuda {

// n vectors. `full`: all lie in the part and are whole.
template <class E, int n, bool full>
struct Batch {
  static constexpr int kVectors = n;
  static constexpr bool kFull = full;
  int64_t offset[n];
  Span spans[n];

  struct Values {
    typename E::Raw raw[n];
    BNEXPORT_DEVICE typename E::Compute operator()(int i, int k) const { return E::get(raw[i], k); }
  };

  // unit_of(i): vector i.
  template <class UnitOf>
  BNEXPORT_DEVICE explicit Batch(const UnitOf& unit_of) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const Unit unit = unit_of(i);
      offset[i] = unit.offset;
      spans[i] = unit.span;
    }
  }
  BNEXPORT_DEVICE Span span(int i) const { return full ? Span{0, E::kWidth} : spans[i]; }
  BNEXPORT_DEVICE bool has(int i) const { return full || spans[i].count() > 0; }
  BNEXPORT_DEVICE bool has(int i, int k) const { return full || E::has(spans[i], k); }
  BNEXPORT_DEVICE int count() const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) sum += span(i).count();
    return sum;
  }

  template <Reuse reuse>
  BNEXPORT_DEVICE Values load(const void* tensor) const {
    const auto* data = static_cast<const typename E::Storage*>(tensor);
    Values values;
#pragma unroll
    for (int i = 0; i < n; ++i) values.raw[i] = E::template load<reuse>(data + offset[i], span(i));
    return values;
  }
  // value(i, k) for element k of vector i.
  template <class Value>
  BNEXPORT_DEVICE void store(void* tensor, const Value& value) const {
    auto* data = static_cast<typename E::Storage*>(tensor);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (!has(i)) continue;
      typename E::Compute values[E::kWidth];
#pragma unroll
      for (int k = 0; k < E::kWidth; ++k) values[k] = value(i, k);
      E::store(data + offset[i], E::pack(values), span(i));
    }
  }
};

// The batches of n vectors from `at` on, as far as all threads' vectors lie in the part if `full`; returns where they
// end.
template <int n, bool full, bool reverse, class Place, class Body>
BNEXPORT_DEVICE uint32_t each_batch(const Place& place, uint32_t at, const Body& body) {
  const uint32_t length = place.length, step = place.step;
  for (; full ? at + n * step <= length : at < length; at += n * step) {
    body(Batch<typename Place::E, n, full>([&](int i) {
      const uint32_t index = at + static_cast<uint32_t>(i) * step + place.offset;
      return full || index < length ? place.unit(reverse ? length - 1 - index : index) : Unit{};
    }));
  }
  return at;
}
// Calls body(batch) for all batches of a thread, of n vectors or fewer; reverse: from the part's end on. What is left
// of whole vectors has bodies of its own: a batch with spans takes as long as a full one.
template <int n, bool reverse, class Place, class Body>
BNEXPORT_DEVICE void each(const Place& place, const Body& body) {
  if constexpr (Place::E::kWhole) {
    const uint32_t at = each_batch<n, true, reverse>(place, 0, body);
    each_batch<1, false, reverse>(place, each_batch<2, true, reverse>(place, at, body), body);
  } else {
    each_batch<n, false, reverse>(place, 0, body);
  }
}
// Brings the first n vectors of a thread into L2, while it still waits for what it needs to use them.
template <int n, bool reverse, class Place>
BNEXPORT_DEVICE void fetch_first(const Place& place, const void* tensor) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const uint32_t index = static_cast<uint32_t>(i) * place.step + place.offset;
    if (index >= place.length) return;
    fetch(static_cast<const typename Place::E::Storage*>(tensor) +
          place.unit(reverse ? place.length - 1 - index : index).offset);
  }
}

template <class Compute>
BNEXPORT_DEVICE Compute median(Compute a, Compute b, Compute c) {
  const Compute low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

template <class Vector>
struct RowPlace {
  using E = Vector;
  static constexpr int kChannels = 1;
  static constexpr uint32_t step = kThreads;
  const Rows& rows;
  const int64_t channel;
  const int part, lanes = 1;
  const bool inside = true;
  const Range range;
  const uint32_t offset, length;

  template <class Args>
  BNEXPORT_DEVICE RowPlace(const Args& args, int block)
      : rows(args.rows),
        channel(block / args.parts),
        part(block % args.parts),
        range(part_of_slab(args.rows, channel, part, args.part_length)),
        offset(static_cast<uint32_t>(thread_index())),
        length(range.end - range.begin) {}

  BNEXPORT_DEVICE Unit unit(uint32_t index) const {
    return unit_of_slab<E::kWidth, E::kWhole>(rows, range, range.begin + index);
  }
  // Where the part's first value lies, nearly: a row's first.
  BNEXPORT_DEVICE int64_t start() const { return range.origin; }
  // Any value near the mean will do, and one of three may be far off.
  BNEXPORT_DEVICE void shift(const typename E::Storage* x, typename E::Compute (&to)[1]) const {
    const auto* row = x + range.origin;
    to[0] = median(E::load_one(row), E::load_one(row + rows.S / 2), E::load_one(row + rows.S - 1));
  }
};

template <class Vector>
struct ColumnPlace {
  using E = Vector;
  static constexpr int kChannels = E::kWidth;
  const int64_t C;
  const int lanes, part;
  const int64_t channel;
  const bool inside;
  const int64_t first, end;  // rows of the part
  const uint32_t step, offset, length;

  template <class Args>
  BNEXPORT_DEVICE ColumnPlace(const Args& args, int block)
      : C(args.params.C),
        lanes(args.lanes),
        part(block / args.tiles),
        channel((int64_t{block % args.tiles} * lanes + thread_index() % lanes) * kChannels),
        inside(channel < C),
        first(part * args.part_length),
        end(first + args.part_length < args.params.N * args.params.S ? first + args.part_length
                                                                     : args.params.N * args.params.S),
        step(static_cast<uint32_t>(kThreads / lanes)),
        offset(static_cast<uint32_t>(thread_index() / lanes)),
        length(inside ? static_cast<uint32_t>(end - first) : 0) {}

  BNEXPORT_DEVICE Unit unit(uint32_t index) const { return {(first + index) * C + channel, {0, E::kWidth}}; }
  BNEXPORT_DEVICE int64_t start() const { return first * C + channel; }
  BNEXPORT_DEVICE void shift(const typename E::Storage* x, typename E::Compute (&to)[kChannels]) const {
    const auto row = [&](int64_t r) {
      return E::template load<Reuse::kSoon>(x + r * C + channel, {0, inside ? E::kWidth : 0});
    };
    const auto a = row(first), b = row((first + end) / 2), c = row(end - 1);
#pragma unroll
    for (int k = 0; k < kChannels; ++k) to[k] = median(E::get(a, k), E::get(b, k), E::get(c, k));
  }
};

}  // namespace bnexport::cuda
