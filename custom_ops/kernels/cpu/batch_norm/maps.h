// Elementwise computations: the output of the forward, and the gradient by the input.
//
// A map knows its inputs and its coefficients, and how rows (map_rows.h) and columns (columns.h) get at them: one
// set for all lanes of a vector, or one for each lane.
#pragma once

#include <cstring>

#include "simd.h"
#include "table.h"

namespace bnexport::cpu {
namespace {

// Arrays of coefficients are of the compute type.
template <class T>
using Plane = std::conditional_t<std::is_same_v<typename T::Compute, double>, Float64, Float32>;

template <class T>
BNEXPORT_INLINE const typename T::Compute* plane(const Planes& planes, int64_t i) {
  return static_cast<const typename T::Compute*>(planes.data) + i * planes.pitch;
}

// y = (x - mean) * scale + bias
template <class T>
struct Normalise {
  using Storage = typename T::Storage;
  using Compute = typename T::Compute;
  static constexpr int kInputs = 1;

  template <class V>
  struct Set {
    V mean, scale, bias;
  };

  const Storage* x;
  const Compute *mean, *scale, *bias;

  Normalise(const void* x, const Planes& k)
      : x(static_cast<const Storage*>(x)), mean(plane<T>(k, 0)), scale(plane<T>(k, 1)), bias(plane<T>(k, 2)) {}

  // The coefficients of channel c for all lanes; those of V::kLanes channels; `count` last lanes from b.
  template <class V>
  BNEXPORT_INLINE Set<V> channel(int64_t c) const {
    return {fill<V>(mean[c]), fill<V>(scale[c]), fill<V>(bias[c])};
  }
  template <class V>
  BNEXPORT_INLINE Set<V> channels(int64_t c) const {
    using P = Plane<T>;
    return {load<P, V>(mean + c), load<P, V>(scale + c), load<P, V>(bias + c)};
  }
  template <class V>
  static BNEXPORT_INLINE Set<V> blend(const Set<V>& a, const Set<V>& b, int64_t count) {
    return {blend_last(a.mean, b.mean, count), blend_last(a.scale, b.scale, count), blend_last(a.bias, b.bias, count)};
  }

  template <class V>
  BNEXPORT_INLINE V at(int64_t i, const Set<V>& k) const {
    return (load<T, V>(x + i) - k.mean) * k.scale + k.bias;
  }

  // The same map with `count` inputs from i on in `buffers`.
  Normalise buffered(Storage (*buffers)[kLanes<T>], int64_t i, int64_t count) const {
    Normalise result = *this;
    std::memcpy(buffers[0], x + i, static_cast<size_t>(count) * sizeof(Storage));
    result.x = buffers[0];
    return result;
  }
};

// dx = ((dy - offset) - (x - mean) * slope) * scale + rest
template <class T>
struct Gradient {
  using Storage = typename T::Storage;
  using Compute = typename T::Compute;
  static constexpr int kInputs = 2;

  template <class V>
  struct Set {
    V mean, scale, offset, slope, rest;
  };

  const Storage *dy, *x;
  const Compute *mean, *scale, *offset, *slope, *rest;

  Gradient(const void* dy, const void* x, const Planes& k)
      : dy(static_cast<const Storage*>(dy)),
        x(static_cast<const Storage*>(x)),
        mean(plane<T>(k, 0)),
        scale(plane<T>(k, 1)),
        offset(plane<T>(k, 2)),
        slope(plane<T>(k, 3)),
        rest(plane<T>(k, 4)) {}

  template <class V>
  BNEXPORT_INLINE Set<V> channel(int64_t c) const {
    return {fill<V>(mean[c]), fill<V>(scale[c]), fill<V>(offset[c]), fill<V>(slope[c]), fill<V>(rest[c])};
  }
  template <class V>
  BNEXPORT_INLINE Set<V> channels(int64_t c) const {
    using P = Plane<T>;
    return {load<P, V>(mean + c), load<P, V>(scale + c), load<P, V>(offset + c), load<P, V>(slope + c),
            load<P, V>(rest + c)};
  }
  template <class V>
  static BNEXPORT_INLINE Set<V> blend(const Set<V>& a, const Set<V>& b, int64_t count) {
    return {blend_last(a.mean, b.mean, count), blend_last(a.scale, b.scale, count),
            blend_last(a.offset, b.offset, count), blend_last(a.slope, b.slope, count),
            blend_last(a.rest, b.rest, count)};
  }

  template <class V>
  BNEXPORT_INLINE V at(int64_t i, const Set<V>& k) const {
    return ((load<T, V>(dy + i) - k.offset) - (load<T, V>(x + i) - k.mean) * k.slope) * k.scale + k.rest;
  }

  Gradient buffered(Storage (*buffers)[kLanes<T>], int64_t i, int64_t count) const {
    Gradient result = *this;
    std::memcpy(buffers[0], dy + i, static_cast<size_t>(count) * sizeof(Storage));
    std::memcpy(buffers[1], x + i, static_cast<size_t>(count) * sizeof(Storage));
    result.dy = buffers[0];
    result.x = buffers[1];
    return result;
  }
};

// y[i], ..., y[i + count - 1], no more than the coefficients have lanes.
template <class T, class Map, class Set>
BNEXPORT_INLINE void map_part(const Map& map, typename T::Storage* y, int64_t i, int64_t count, const Set& k) {
  typename T::Storage buffers[Map::kInputs][kLanes<T>] = {}, result[kLanes<T>];
  store<T, false>(result, map.buffered(buffers, i, count).at(0, k));
  std::memcpy(y + i, result, static_cast<size_t>(count) * sizeof(result[0]));
}

}  // namespace
}  // namespace bnexport::cpu
