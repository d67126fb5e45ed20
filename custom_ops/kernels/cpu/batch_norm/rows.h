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
#pragma once

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

// Two sums of two accumulators each: four vectors in flight. Where those fill the registers (16 of 16 bytes), the
// halves of all vectors are summed one after the other; lanes do not mix, and the block stays in L1.
constexpr bool kHalves = kParts > 2;
template <class V, bool halves>
struct SumLanes {
  using Type = V;
};
template <class V>
struct SumLanes<V, true> {
  using Type = typename V::Half;
};
template <class T>
using Summed = typename SumLanes<typename T::Vector, kHalves>::Type;

template <class V>
struct TwoSums {
  V first, second;
};

// sums(lane): two sums of the lanes from `lane` on, of type Summed<T>.
template <class T, class Sums>
BNEXPORT_INLINE TwoSums<typename T::Vector> all_lanes(const Sums& sums) {
  if constexpr (kHalves) {
    const auto low = sums(0), high = sums(kLanes<T> / 2);
    return {{low.first, high.first}, {low.second, high.second}};
  } else {
    return sums(0);
  }
}

template <class T>
BNEXPORT_INLINE TwoSums<Summed<T>> lane_pivot_sums(const typename T::Storage* x, Span span, typename T::Compute at,
                                                   int64_t lane) {
  using V = Summed<T>;
  constexpr int64_t W = kLanes<T>;
  const auto pivot = fill<V>(at);
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
        const V a = load<T, V>(x + i + lane) - pivot;
        s0 += a;
        q0 += a * a;
        const V b = load<T, V>(x + i + W + lane) - pivot;
        s1 += b;
        q1 += b * b;
      }
      if (stop < span.cols) empty_lanes();
    }
    if (i + W <= span.cols) {
      const V a = load<T, V>(x + i + lane) - pivot;
      s0 += a;
      q0 += a * a;
      i += W;
    }
    if (i < span.cols) {
      const V b = keep_last(load<T, V>(x + span.cols - W + lane) - pivot, span.cols - i, lane);
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
  return {s, q};
}

template <class T>
BNEXPORT_OUTLINE PivotSums pivot_sums(const typename T::Storage* x, Span span, typename T::Compute pivot) {
  const auto sums = all_lanes<T>([&](int64_t lane) { return lane_pivot_sums<T>(x, span, pivot, lane); });
  return {sum_lanes(sums.first), sum_lanes(sums.second)};
}

// The same in double, for float data whose squares overflow or vanish in float.
template <class T>
BNEXPORT_OUTLINE PivotSums pivot_sums_wide(const typename T::Storage* x, Span span, double at) {
  constexpr int64_t W = kLanes<T>;
  const auto pivot = fill<VectorD>(at);
  VectorD s{}, q{};
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride) {
    for (int64_t i = 0; i < span.cols; i += W) {
      const int64_t count = span.cols - i < W ? span.cols - i : W;
      const auto v = doubles(load<T, VectorF>(count == W ? x + i : x + span.cols - W));
      VectorD a = v.low - pivot, b = v.high - pivot;
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
  const auto at = [&](int64_t row, int64_t col) { return first_value<T>(x + row * span.stride + col); };
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
      if (!__builtin_isfinite(wide_pivot)) wide_pivot = static_cast<double>(first_value<T>(x));
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

template <class T>
BNEXPORT_INLINE TwoSums<Summed<T>> lane_gradient_sums(const typename T::Storage* dy, const typename T::Storage* x,
                                                      Span span, typename T::Compute mean, int64_t lane) {
  using V = Summed<T>;
  constexpr int64_t W = kLanes<T>;
  const auto pivot = fill<V>(mean);
  V a0{}, a1{}, b0{}, b1{};
  for (int64_t r = 0; r < span.rows; ++r, x += span.stride, dy += span.stride) {
    int64_t i = 0;
    for (; i + 2 * W <= span.cols; i += 2 * W) {
      const V g = load<T, V>(dy + i + lane);
      a0 += g;
      b0 += g * (load<T, V>(x + i + lane) - pivot);
      const V h = load<T, V>(dy + i + W + lane);
      a1 += h;
      b1 += h * (load<T, V>(x + i + W + lane) - pivot);
    }
    if (i + W <= span.cols) {
      const V g = load<T, V>(dy + i + lane);
      a0 += g;
      b0 += g * (load<T, V>(x + i + lane) - pivot);
      i += W;
    }
    if (i < span.cols) {
      const V g = load<T, V>(dy + span.cols - W + lane);
      a1 += keep_last(g, span.cols - i, lane);
      b1 += keep_last(g * (load<T, V>(x + span.cols - W + lane) - pivot), span.cols - i, lane);
    }
  }
  return {a0 + a1, b0 + b1};
}

template <class T>
BNEXPORT_OUTLINE GradientSums block_gradient_sums(const typename T::Storage* dy, const typename T::Storage* x,
                                                  Span span, double mean) {
  const auto pivot = static_cast<typename T::Compute>(mean);
  const auto sums = all_lanes<T>([&](int64_t lane) { return lane_gradient_sums<T>(dy, x, span, pivot, lane); });
  const double sum = sum_lanes(sums.first);
  return {sum, sum_lanes(sums.second) - (mean - static_cast<double>(pivot)) * sum};
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

}  // namespace
}  // namespace bnexport::cpu
