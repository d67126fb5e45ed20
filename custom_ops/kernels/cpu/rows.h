// Inner loops over rows of one channel (NCHW): block statistics, normalisation, gradient.
//
// Statistics of a block. With a pivot K near the mean, d = x - K, s = sum d, q = sum d^2, n values:
//
//   mean = K + s / n        M2 = q - s^2 / n
//
// This is one pass, exact as long as K is within a few standard deviations of the mean: the
// subtraction loses a factor 1 + (s/n)^2 / var of precision. K is the mean of four values spread over
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

// Lanes are emptied into a second level after this many values: a lane then adds at most 16 terms, and
// its sum at most 8, so that rounding errors grow with 24 and not with 128 of them. One value far from
// the others would otherwise swallow what 128 others add to its lane.
constexpr int64_t kSegment = 512;

template <class T>
BNEXPORT_INLINE PivotSums pivot_sums(const typename T::Storage* x, Span span, typename T::Compute pivot) {
  using V = typename T::Vector;
  constexpr int64_t W = kLanes<T>;
  V s{}, q{}, s0{}, s1{}, q0{}, q1{};
  const auto empty_lanes = [&] {
    s += s0 + s1;
    q += q0 + q1;
    s0 = s1 = q0 = q1 = V{};
  };
  int64_t pending = 0;
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride) {
    int64_t i = 0;
    while (i + 2 * W <= span.cols) {
      const int64_t stop = i + kSegment < span.cols ? i + kSegment : span.cols;
      for (; i + 2 * W <= stop; i += 2 * W) {
        const V a = T::load(x + i) - pivot, b = T::load(x + i + W) - pivot;
        s0 += a;
        s1 += b;
        q0 += a * a;
        q1 += b * b;
      }
      if (stop < span.cols) empty_lanes();
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
    pending += span.cols;
    if (pending >= kSegment) {
      empty_lanes();
      pending = 0;
    }
  }
  empty_lanes();
  return {sum_lanes(s), sum_lanes(q)};
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
BNEXPORT_INLINE Moments block_moments(const typename T::Storage* x, Span span, double n, double inverse_n) {
  using Compute = typename T::Compute;
  const auto at = [&](int64_t row, int64_t col) { return T::load(x + row * span.stride + col)[0]; };
  const int64_t far = span.cols - kLanes<T>;
  Compute pivot = (at(0, 0) + at(span.rows / 4, far / 2) + at(span.rows / 2, far) + at(span.rows - 1, far / 3)) / 4;
  PivotSums sums = pivot_sums<T>(x, span, pivot);
  if (far_off(sums, n)) {
    pivot = static_cast<Compute>(pivot + sums.s * inverse_n);
    sums = pivot_sums<T>(x, span, pivot);
  }
  if constexpr (std::is_same_v<Compute, float>) {
    // Beyond these the squares of single lanes may be infinite or denormal. NaN comes here too, and
    // stays NaN. A block of equal values has q = 0 and is worth the second look: it may be tiny.
    if (!(sums.q < 1e34 && sums.q > 1e-26 * n)) {
      auto wide_pivot = static_cast<double>(pivot);
      if (!__builtin_isfinite(wide_pivot)) wide_pivot = static_cast<double>(T::load(x)[0]);
      for (int attempt = 0; attempt < 2; ++attempt) {
        sums = pivot_sums_wide<T>(x, span, wide_pivot);
        if (attempt == 1 || !far_off(sums, n)) break;
        wide_pivot += sums.s * inverse_n;
      }
      const double shift = sums.s * inverse_n;
      const double m2 = sums.q - sums.s * shift;
      return {n, wide_pivot + shift, m2 < 0 ? 0 : m2};
    }
  }
  const double shift = sums.s * inverse_n;
  const double m2 = sums.q - sums.s * shift;
  return {n, static_cast<double>(pivot) + shift, m2 < 0 ? 0 : m2};
}

template <class T>
void moments(const void* data, Span span, int64_t channels, Moments* all) {
  const auto* x = static_cast<const typename T::Storage*>(data);
  const double n = static_cast<double>(span.rows * span.cols), inverse_n = 1 / n;
  for (int64_t c = 0; c < channels; ++c) all[c].merge(block_moments<T>(x + c * span.cols, span, n, inverse_n));
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

template <class T, bool stream>
void normalise_rows(const typename T::Storage* x, typename T::Storage* y, Span span, int64_t channels,
                    const ForwardCoefficients* coefficients) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  for (int64_t r = 0; r < span.rows; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      const auto mean = static_cast<Compute>(coefficients[c].mean), scale = static_cast<Compute>(coefficients[c].scale);
      const auto bias = static_cast<Compute>(coefficients[c].bias);
      const int64_t start = r * span.stride + c * span.cols;
      map_row<T, stream>(
          y + start, span.cols, [&](int64_t i) { return T::load(x + start + i); },
          [&](V v) { return (v - mean) * scale + bias; });
    }
  }
  if constexpr (stream) stream_fence();
}

template <class T>
void normalise(const void* x, void* y, Span span, int64_t channels, const ForwardCoefficients* coefficients,
               bool stream) {
  const auto* from = static_cast<const typename T::Storage*>(x);
  auto* to = static_cast<typename T::Storage*>(y);
  if (stream) {
    normalise_rows<T, true>(from, to, span, channels, coefficients);
  } else {
    normalise_rows<T, false>(from, to, span, channels, coefficients);
  }
}

template <class T>
BNEXPORT_INLINE GradientSums block_gradient_sums(const typename T::Storage* dy, const typename T::Storage* x, Span span,
                                                 double mean) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  constexpr int64_t W = kLanes<T>;
  const auto pivot = static_cast<Compute>(mean);
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

template <class T>
void gradient_sums(const void* dy_data, const void* x_data, Span span, int64_t channels, const double* mean,
                   GradientSums* all) {
  const auto* dy = static_cast<const typename T::Storage*>(dy_data);
  const auto* x = static_cast<const typename T::Storage*>(x_data);
  for (int64_t c = 0; c < channels; ++c) {
    const GradientSums block = block_gradient_sums<T>(dy + c * span.cols, x + c * span.cols, span, mean[c]);
    all[c].dy += block.dy;
    all[c].dy_x_hat += block.dy_x_hat;
  }
}

template <class T, bool stream>
void gradient_rows(const typename T::Storage* dy, const typename T::Storage* x, typename T::Storage* dx, Span span,
                   int64_t channels, const BackwardCoefficients* coefficients) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  struct Pair {
    V g, v;
  };
  for (int64_t r = 0; r < span.rows; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      const BackwardCoefficients& k = coefficients[c];
      const auto mean = static_cast<Compute>(k.mean), offset = static_cast<Compute>(k.offset);
      const auto scale = static_cast<Compute>(k.scale), slope = static_cast<Compute>(k.slope);
      const auto rest = static_cast<Compute>(k.rest);
      const int64_t start = r * span.stride + c * span.cols;
      map_row<T, stream>(
          dx + start, span.cols, [&](int64_t i) { return Pair{T::load(dy + start + i), T::load(x + start + i)}; },
          [&](const Pair& p) { return ((p.g - offset) - (p.v - mean) * slope) * scale + rest; });
    }
  }
  if constexpr (stream) stream_fence();
}

template <class T>
void gradient(const void* dy, const void* x, void* dx, Span span, int64_t channels,
              const BackwardCoefficients* coefficients, bool stream) {
  using Storage = typename T::Storage;
  const auto *g = static_cast<const Storage*>(dy), *v = static_cast<const Storage*>(x);
  if (stream) {
    gradient_rows<T, true>(g, v, static_cast<Storage*>(dx), span, channels, coefficients);
  } else {
    gradient_rows<T, false>(g, v, static_cast<Storage*>(dx), span, channels, coefficients);
  }
}

}  // namespace
}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_ROWS_H
