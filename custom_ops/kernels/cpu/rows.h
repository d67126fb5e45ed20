// Inner loops over rows of one channel (NCHW): block statistics, normalisation, gradient.
//
// Statistics of a block. With a pivot K near the mean, d = x - K, s = sum d, q = sum d^2, n values:
//
//   mean = K + s / n        M2 = q - s^2 / n
//
// This is one pass, exact as long as K is within a few standard deviations of the mean: the
// subtraction loses a factor 1 + (s/n)^2 / var of precision. K is the mean of four vectors spread over
// the block; where that was a bad choice (a loss of more than 3) the block, still in L1, is read again
// with K = K + s / n. Where the squares leave the range of float32, it is read again in double. Both
// depend on the block alone, so the result does not depend on threads.
#ifndef BNEXPORT_KERNELS_CPU_ROWS_H
#define BNEXPORT_KERNELS_CPU_ROWS_H

#include <type_traits>

#include "simd.h"
#include "table.h"

namespace bnexport::cpu {
namespace {

struct PivotSums {
  double s, q;
};

template <class T>
BNEXPORT_INLINE PivotSums pivot_sums(const typename T::Storage* x, Span span, typename T::Compute pivot) {
  using V = typename T::Vector;
  constexpr int64_t W = kLanes<T>;
  V s0{}, s1{}, q0{}, q1{};
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride) {
    int64_t i = 0;
    for (; i + 2 * W <= span.cols; i += 2 * W) {
      const V a = T::load(x + i) - pivot, b = T::load(x + i + W) - pivot;
      s0 += a;
      s1 += b;
      q0 += a * a;
      q1 += b * b;
    }
    if (i + W <= span.cols) {
      const V a = T::load(x + i) - pivot;
      s0 += a;
      q0 += a * a;
      i += W;
    }
    if (i < span.cols) {
      const V b = keep_last(T::load(x + span.cols - W) - pivot, span.cols - i);
      s1 += b;
      q1 += b * b;
    }
  }
  return {sum_lanes(s0 + s1), sum_lanes(q0 + q1)};
}

// The same in double, for float data whose squares overflow or vanish in float.
template <class T>
PivotSums pivot_sums_wide(const typename T::Storage* x, Span span, double pivot) {
  VectorD s{}, q{};
  constexpr int64_t W = kLanes<T>;
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride) {
    for (int64_t i = 0; i < span.cols; i += W) {
      const int64_t count = span.cols - i < W ? span.cols - i : W;
      const VectorF v = T::load(count == W ? x + i : x + span.cols - W);
      VectorD a = lower(v) - pivot, b = upper(v) - pivot;
      if (count < W) {
        a = keep_last(a, count > W / 2 ? count - W / 2 : 0);
        b = keep_last(b, count > W / 2 ? W / 2 : count);
      }
      s += a + b;
      q += a * a + b * b;
    }
  }
  return {sum_lanes(s), sum_lanes(q)};
}

// Whether the pivot was more than sqrt(2) standard deviations off: (s/n)^2 > 2 (q/n - (s/n)^2).
BNEXPORT_INLINE bool far_off(const PivotSums& sums, double n) { return 3 * sums.s * sums.s > 2 * sums.q * n; }

template <class T>
Moments moments(const void* data, Span span) {
  using Compute = typename T::Compute;
  const auto* x = static_cast<const typename T::Storage*>(data);
  const double n = static_cast<double>(span.rows) * static_cast<double>(span.cols);
  typename T::Vector sample{};
  for (int64_t k = 0; k < 4; ++k) {
    sample += T::load(x + span.rows * k / 4 * span.stride + (span.cols - kLanes<T>)*k / 3);
  }
  Compute pivot = static_cast<Compute>(sum_lanes(sample) / (4 * kLanes<T>));
  PivotSums sums = pivot_sums<T>(x, span, pivot);
  if (far_off(sums, n)) {
    pivot = static_cast<Compute>(pivot + sums.s / n);
    sums = pivot_sums<T>(x, span, pivot);
  }
  if constexpr (std::is_same_v<Compute, float>) {
    // Beyond these the squares of single lanes may be infinite or denormal. NaN comes here too, and
    // stays NaN. A block of equal values has q = 0 and is worth the second look: it may be tiny.
    if (!(sums.q < 1e34 && sums.q > 1e-26 * n)) {
      double wide_pivot = static_cast<double>(pivot);
      if (!(wide_pivot - wide_pivot == 0)) wide_pivot = static_cast<double>(T::load(x)[0]);
      for (int attempt = 0; attempt < 2; ++attempt) {
        sums = pivot_sums_wide<T>(x, span, wide_pivot);
        if (attempt == 1 || !far_off(sums, n)) break;
        wide_pivot += sums.s / n;
      }
      const double shift = sums.s / n;
      const double m2 = sums.q - sums.s * shift;
      return {n, wide_pivot + shift, m2 < 0 ? 0 : m2};
    }
  }
  const double shift = sums.s / n;
  const double m2 = sums.q - sums.s * shift;
  return {n, static_cast<double>(pivot) + shift, m2 < 0 ? 0 : m2};
}

// How many elements from `to` until a streaming store is aligned; the row is at least that long.
template <class T>
BNEXPORT_INLINE int64_t elements_to_alignment(const typename T::Storage* to) {
  const uintptr_t bytes = kLanes<T> * sizeof(typename T::Storage);
  return static_cast<int64_t>((bytes - reinterpret_cast<uintptr_t>(to) % bytes) % bytes / sizeof(typename T::Storage));
}

// y = map(i) for one row; `load(i)` reads everything that map needs, so that y may be x. The last
// vector is loaded before the stores that could overwrite what it overlaps.
template <class T, bool stream, class Load, class Map>
BNEXPORT_INLINE void map_row(typename T::Storage* y, int64_t n, const Load& load, const Map& map) {
  constexpr int64_t W = kLanes<T>;
  const auto last = map(load(n - W));
  int64_t i = 0;
  if constexpr (stream) {
    const int64_t lead = elements_to_alignment<T>(y);
    if (lead != 0) {
      // The first vector overlaps the next one: load that one before the store.
      const auto first = map(load(0));
      if (lead + W <= n) {
        const auto second = map(load(lead));
        T::template store<false>(y, first);
        T::template store<false>(y + lead, second);
        i = lead + W;
      } else {
        T::template store<false>(y, first);
        i = W;
      }
    }
  }
  for (; i + 2 * W <= n; i += 2 * W) {
    const auto a = map(load(i)), b = map(load(i + W));
    T::template store<stream>(y + i, a);
    T::template store<stream>(y + i + W, b);
  }
  for (; i + W <= n; i += W) T::template store<stream>(y + i, map(load(i)));
  if (i < n) T::template store<false>(y + n - W, last);
}

// The mean is split into the part that fits the compute type and the rest, which is so small that it
// can join the bias without cancellation: x - mean is then as good as in double.
template <class T, bool stream>
BNEXPORT_INLINE void normalise_rows(const typename T::Storage* x, typename T::Storage* y, Span span,
                                    const ForwardCoefficients& c) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  const Compute mean = static_cast<Compute>(c.mean), scale = static_cast<Compute>(c.scale);
  const double rest = c.mean - static_cast<double>(mean);
  const Compute bias = static_cast<Compute>(rest == rest ? c.bias - rest * c.scale : c.bias);
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride, y += span.stride) {
    map_row<T, stream>(
        y, span.cols, [&](int64_t i) { return T::load(x + i); }, [&](V v) { return (v - mean) * scale + bias; });
  }
}

template <class T>
void normalise(const void* x, void* y, Span span, const ForwardCoefficients& coefficients, bool stream) {
  const auto* from = static_cast<const typename T::Storage*>(x);
  auto* to = static_cast<typename T::Storage*>(y);
  if (stream) {
    normalise_rows<T, true>(from, to, span, coefficients);
  } else {
    normalise_rows<T, false>(from, to, span, coefficients);
  }
}

template <class T>
GradientSums gradient_sums(const void* dy_data, const void* x_data, Span span, double mean) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  constexpr int64_t W = kLanes<T>;
  const auto* dy = static_cast<const typename T::Storage*>(dy_data);
  const auto* x = static_cast<const typename T::Storage*>(x_data);
  const Compute pivot = static_cast<Compute>(mean);
  V a0{}, a1{}, b0{}, b1{};
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride, dy += span.stride) {
    int64_t i = 0;
    for (; i + 2 * W <= span.cols; i += 2 * W) {
      const V g = T::load(dy + i), h = T::load(dy + i + W);
      a0 += g;
      a1 += h;
      b0 += g * (T::load(x + i) - pivot);
      b1 += h * (T::load(x + i + W) - pivot);
    }
    if (i + W <= span.cols) {
      const V g = T::load(dy + i);
      a0 += g;
      b0 += g * (T::load(x + i) - pivot);
      i += W;
    }
    if (i < span.cols) {
      const V g = T::load(dy + span.cols - W);
      a1 += keep_last(g, span.cols - i);
      b1 += keep_last(g * (T::load(x + span.cols - W) - pivot), span.cols - i);
    }
  }
  const double sum = sum_lanes(a0 + a1);
  return {sum, sum_lanes(b0 + b1) - (mean - static_cast<double>(pivot)) * sum};
}

template <class T, bool stream>
BNEXPORT_INLINE void gradient_rows(const typename T::Storage* dy, const typename T::Storage* x,
                                   typename T::Storage* dx, Span span, const BackwardCoefficients& c) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  struct Pair {
    V g, v;
  };
  const Compute mean = static_cast<Compute>(c.mean), offset = static_cast<Compute>(c.offset);
  const Compute scale = static_cast<Compute>(c.scale), slope = static_cast<Compute>(c.slope);
  const double mean_rest = c.mean - static_cast<double>(mean), offset_rest = c.offset - static_cast<double>(offset);
  const Compute rest = static_cast<Compute>(c.scale * (mean_rest * c.slope - offset_rest));
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride, dy += span.stride, dx += span.stride) {
    map_row<T, stream>(
        dx, span.cols, [&](int64_t i) { return Pair{T::load(dy + i), T::load(x + i)}; },
        [&](const Pair& p) { return ((p.g - offset) - (p.v - mean) * slope) * scale + rest; });
  }
}

template <class T>
void gradient(const void* dy, const void* x, void* dx, Span span, const BackwardCoefficients& c, bool stream) {
  using Storage = typename T::Storage;
  if (stream) {
    gradient_rows<T, true>(static_cast<const Storage*>(dy), static_cast<const Storage*>(x), static_cast<Storage*>(dx),
                           span, c);
  } else {
    gradient_rows<T, false>(static_cast<const Storage*>(dy), static_cast<const Storage*>(x),
                            static_cast<Storage*>(dx), span, c);
  }
}

}  // namespace
}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_ROWS_H
