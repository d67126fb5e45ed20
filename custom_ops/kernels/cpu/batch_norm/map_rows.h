// Elementwise computations over rows.
//
// Neighbouring rows belong to neighbouring channels and are walked as one run of memory, so that all stores but
// those at the ends are aligned whatever the length of a row. A piece that holds the end of one row and the
// beginning of the next takes its coefficients from both.
#pragma once

#include "maps.h"

namespace bnexport::cpu {
namespace {

// How many elements from `to` until a vector is aligned.
template <class T>
BNEXPORT_INLINE int64_t elements_to_alignment(const typename T::Storage* to) {
  const uintptr_t bytes = kLanes<T> * sizeof(typename T::Storage);
  return static_cast<int64_t>((bytes - reinterpret_cast<uintptr_t>(to) % bytes) % bytes / sizeof(typename T::Storage));
}

// y = map of `channels` rows of n >= kShortestRow values from `start` on, the first of channel 0.
template <class T, bool stream, class Map>
BNEXPORT_INLINE void map_run(const Map& map, typename T::Storage* y, int64_t start, int64_t n, int64_t channels) {
  using P = typename T::Piece;
  constexpr int64_t w = kPiece<T>;
  int64_t i = start, end = start;
  if (const int64_t lead = elements_to_alignment<T>(y + start); lead != 0) {
    map_part<T>(map, y, i, lead, map.template channel<typename T::Vector>(0));
    i += lead;
  }
  for (int64_t c = 0; c < channels; ++c) {
    const auto k = map.template channel<P>(c);
    end += n;
    for (; T::kUnrolls && i + 4 * w <= end; i += 4 * w) {
      store<T, stream>(y + i, map.at(i, k));
      store<T, stream>(y + i + w, map.at(i + w, k));
      store<T, stream>(y + i + 2 * w, map.at(i + 2 * w, k));
      store<T, stream>(y + i + 3 * w, map.at(i + 3 * w, k));
    }
    for (; i + w <= end; i += w) store<T, stream>(y + i, map.at(i, k));
    if (i == end) continue;
    if (c + 1 == channels) {
      map_part<T>(map, y, i, end - i, k);
    } else {
      const auto mixed = Map::blend(k, map.template channel<P>(c + 1), i + w - end);
      store<T, stream>(y + i, map.at(i, mixed));
      i += w;
    }
  }
}

template <class T, class Map>
BNEXPORT_INLINE void map_rows(const Map& map, void* to, Span span, int64_t channels, bool stream) {
  auto* y = static_cast<typename T::Storage*>(to);
  if (stream) {
    for (int64_t r = 0; r < span.rows; ++r) map_run<T, true>(map, y, r * span.stride, span.cols, channels);
    stream_fence();
  } else {
    for (int64_t r = 0; r < span.rows; ++r) map_run<T, false>(map, y, r * span.stride, span.cols, channels);
  }
}

template <class T>
void normalise(const void* x, void* y, Span span, int64_t channels, const Planes& coefficients, bool stream) {
  map_rows<T>(Normalise<T>(x, coefficients), y, span, channels, stream);
}

template <class T>
void gradient(const void* dy, const void* x, void* dx, Span span, int64_t channels, const Planes& coefficients,
              bool stream) {
  map_rows<T>(Gradient<T>(dy, x, coefficients), dx, span, channels, stream);
}

}  // namespace
}  // namespace bnexport::cpu
