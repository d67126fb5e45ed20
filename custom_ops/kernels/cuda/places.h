// A block's place in a tensor: a part of a tile of channels, and its values as batches of vectors.
//
//   RowPlace      NCS: one channel, a part of its slab
//   ColumnPlace   NSC, and NCS with one pixel: a matrix of N * S rows and C columns, one channel each. A block is
//   `lanes`
//                 threads wide and kThreads / lanes high; a thread takes one vector of columns
//
// A thread takes a batch of vectors at a time, so that as many independent loads are in flight per thread and a warp's
// accesses are consecutive. A thread has values of kChannels channels, element k of a vector of channel
// k % kChannels; threads a multiple of `lanes` apart have the same channels.
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
  BNEXPORT_DEVICE void load(const void* tensor, typename E::Raw (&raw)[n]) const {
    const auto* data = static_cast<const typename E::Storage*>(tensor);
#pragma unroll
    for (int i = 0; i < n; ++i) raw[i] = E::template load<reuse>(data + offset[i], span(i));
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

// Calls body(i, is_full) for batches 0 to `all`, of which the first `whole` are full; reverse: from the last one on.
template <bool reverse, class Body>
BNEXPORT_DEVICE void in_order(uint32_t whole, uint32_t all, const Body& body) {
  const auto rest = [&] {
    for (uint32_t i = whole; i < all; ++i) body(reverse ? all - 1 - (i - whole) : i, std::false_type{});
  };
  if constexpr (reverse) rest();
  for (uint32_t i = 0; i < whole; ++i) body(reverse ? whole - 1 - i : i, std::true_type{});
  if constexpr (!reverse) rest();
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
  const Rows& rows;
  const int64_t channel;
  const int part, lanes = 1;
  const bool inside = true;
  const Range range;

  template <class Args>
  BNEXPORT_DEVICE RowPlace(const Args& args, int block)
      : rows(args.rows),
        channel(block / args.parts),
        part(block % args.parts),
        range(part_of_slab(args.rows, channel, part, args.part_length)) {}

  // Calls body(batch) for all batches of a thread, of n vectors each; reverse: from the last one on. Full ones have a body
  // of their own, without spans.
  template <int n, bool reverse, class Body>
  BNEXPORT_DEVICE void each(const Body& body) const {
    const uint32_t all = range.end - range.begin, whole = E::kWhole ? all / (n * kThreads) : 0;
    in_order<reverse>(whole, (all + n * kThreads - 1) / (n * kThreads), [&](uint32_t i, auto is_full) {
      const uint32_t index = range.begin + i * (n * kThreads) + static_cast<uint32_t>(thread_index());
      body(Batch<E, n, is_full.value>([&](int j) {
        return unit_of_slab<E::kWidth, E::kWhole>(rows, range, index + static_cast<uint32_t>(j * kThreads));
      }));
    });
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

  template <class Args>
  BNEXPORT_DEVICE ColumnPlace(const Args& args, int block)
      : C(args.params.C),
        lanes(args.lanes),
        part(block / args.tiles),
        channel((int64_t{block % args.tiles} * lanes + thread_index() % lanes) * kChannels),
        inside(channel < C),
        first(part * args.part_length),
        end(first + args.part_length < args.params.N * args.params.S ? first + args.part_length
                                                                    : args.params.N * args.params.S) {}

  template <int n, bool reverse, class Body>
  BNEXPORT_DEVICE void each(const Body& body) const {
    const int64_t high = kThreads / lanes, all = inside ? end - first : 0;
    in_order<reverse>(static_cast<uint32_t>(all / (n * high)), static_cast<uint32_t>((all + n * high - 1) / (n * high)),
                      [&](uint32_t i, auto is_full) {
                        const int64_t row = first + i * (n * high) + thread_index() / lanes;
                        body(Batch<E, n, is_full.value>([&](int j) {
                          const int64_t r = row + j * high;
                          return Unit{r * C + channel, {0, r < end ? E::kWidth : 0}};
                        }));
                      });
  }
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
