// Inner loops over columns (NHWC, and NCHW with few pixels): each lane is a column, so nothing is
// summed across lanes. The statistics are those of rows.h, pivot by column: the column's first value,
// and the second look for a vector of columns is taken when any of its lanes asks for it.
//
// kTogether neighbouring vectors are taken at once where registers allow it: walking down one vector
// of a wide row touches a new line with each step, which memory delivers at a third of its speed.
// Columns do not mix, so this changes no bit. The last, partial vector goes through a small buffer.
#ifndef BNEXPORT_KERNELS_CPU_COLUMNS_H
#define BNEXPORT_KERNELS_CPU_COLUMNS_H

#include <type_traits>

#include "simd.h"
#include "table.h"

namespace bnexport::cpu {
namespace {

template <class T, bool whole>
BNEXPORT_INLINE typename T::Vector load_columns(const typename T::Storage* from, int64_t count) {
  if constexpr (whole) {
    (void)count;
    return T::load(from);
  } else {
    return load_part<T>(from, count);
  }
}

#if defined(__AVX512F__)
constexpr int64_t kTogether = 4;
#else
constexpr int64_t kTogether = 1;
#endif
// The gradient holds five coefficients a vector.
constexpr int64_t kGradientTogether = kTogether > 1 ? kTogether / 2 : 1;

template <class T, bool whole, bool stream = false>
BNEXPORT_INLINE void store_columns(typename T::Storage* to, typename T::Vector value, int64_t count) {
  if constexpr (whole) {
    (void)count;
    T::template store<stream>(to, value);
  } else {
    store_part<T>(to, value, count);
  }
}

// One column in double; for blocks whose squares leave the range of the compute type.
template <class T>
Moments column_moments_wide(const typename T::Storage* x, int64_t rows, int64_t stride) {
  Moments result;
  const auto n = static_cast<double>(rows);
  auto pivot = static_cast<double>(load_part<T>(x, 1)[0]);
  for (int attempt = 0; attempt < 2; ++attempt) {
    double s = 0, q = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const double d = static_cast<double>(load_part<T>(x + r * stride, 1)[0]) - pivot;
      s += d;
      q += d * d;
    }
    const double m2 = q - s * s / n;
    result = {n, pivot + s / n, m2 < 0 ? 0 : m2};
    if (!(3 * s * s > 2 * q * n)) break;
    pivot += s / n;
  }
  return result;
}

// As kSegment in rows.h.
constexpr int64_t kColumnSegment = 16;

// G vectors of columns over at most kColumnBlock rows, merged into mean and m2, which so far hold
// `before` values. count: columns of a vector that is not whole (then G is 1).
template <class T, bool whole, int64_t G>
BNEXPORT_INLINE void merge_column_block(const typename T::Storage* x, int64_t rows, int64_t stride, int64_t count,
                                        int64_t before, double* mean, double* m2) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  constexpr int64_t W = kLanes<T>;
  const auto n = static_cast<Compute>(rows);
  V pivot[G], s[G], q[G];
  for (int64_t g = 0; g < G; ++g) pivot[g] = load_columns<T, whole>(x + g * W, count);
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (int64_t g = 0; g < G; ++g) s[g] = q[g] = V{};
    const typename T::Storage* row = x;
    for (int64_t r = 0; r < rows;) {
      V s0[G] = {}, q0[G] = {};
      for (const int64_t stop = r + kColumnSegment < rows ? r + kColumnSegment : rows; r < stop; ++r, row += stride) {
#pragma GCC unroll 4
        for (int64_t g = 0; g < G; ++g) {
          const V d = load_columns<T, whole>(row + g * W, count) - pivot[g];
          s0[g] += d;
          q0[g] += d * d;
        }
      }
      for (int64_t g = 0; g < G; ++g) {
        s[g] += s0[g];
        q[g] += q0[g];
      }
    }
    if (attempt == 1) break;
    bool again = false;
    for (int64_t g = 0; g < G; ++g) {
      bool bad = false;
      for (int64_t i = 0; i < count; ++i) bad |= 3 * s[g][i] * s[g][i] > 2 * q[g][i] * n;
      if (bad) pivot[g] += s[g] / n;
      again |= bad;
    }
    if (!again) break;
  }
  for (int64_t g = 0; g < G; ++g) {
    for (int64_t i = 0; i < count; ++i) {
      const double nd = static_cast<double>(rows), shift = static_cast<double>(s[g][i]) / nd;
      const double spread = static_cast<double>(q[g][i]) - static_cast<double>(s[g][i]) * shift;
      Moments block{nd, static_cast<double>(pivot[g][i]) + shift, spread < 0 ? 0 : spread};
      if constexpr (std::is_same_v<Compute, float>) {
        if (!(q[g][i] < 1e34f && q[g][i] > 1e-26f)) block = column_moments_wide<T>(x + g * W + i, rows, stride);
      }
      Moments all{static_cast<double>(before), mean[g * W + i], m2[g * W + i]};
      all.merge(block);
      mean[g * W + i] = all.mean;
      m2[g * W + i] = all.m2;
    }
  }
}

template <class T>
void column_moments(const void* data, Span span, double* mean, double* m2) {
  constexpr int64_t W = kLanes<T>;
  const auto* x = static_cast<const typename T::Storage*>(data);
  for (int64_t c = 0; c < span.cols; ++c) mean[c] = m2[c] = 0;
  for (int64_t r = 0; r < span.rows; r += kColumnBlock) {
    const int64_t rows = span.rows - r < kColumnBlock ? span.rows - r : kColumnBlock;
    const auto* block = x + r * span.stride;
    int64_t c = 0;
    for (; c + kTogether * W <= span.cols; c += kTogether * W) {
      merge_column_block<T, true, kTogether>(block + c, rows, span.stride, W, r, mean + c, m2 + c);
    }
    for (; c + W <= span.cols; c += W) {
      merge_column_block<T, true, 1>(block + c, rows, span.stride, W, r, mean + c, m2 + c);
    }
    if (c < span.cols) {
      merge_column_block<T, false, 1>(block + c, rows, span.stride, span.cols - c, r, mean + c, m2 + c);
    }
  }
}

template <class T, bool whole, int64_t G, bool stream>
BNEXPORT_INLINE void normalise_columns(const typename T::Storage* x, typename T::Storage* y, int64_t rows,
                                       int64_t stride, int64_t count, const ForwardCoefficients* c) {
  using Compute = typename T::Compute;
  constexpr int64_t W = kLanes<T>;
  typename T::Vector mean[G] = {}, scale[G] = {}, bias[G] = {};
  for (int64_t g = 0; g < G; ++g) {
    for (int64_t i = 0; i < count; ++i) {
      mean[g][i] = static_cast<Compute>(c[g * W + i].mean);
      scale[g][i] = static_cast<Compute>(c[g * W + i].scale);
      bias[g][i] = static_cast<Compute>(c[g * W + i].bias);
    }
  }
  for (int64_t r = 0; r < rows; ++r, x += stride, y += stride) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) {
      const auto v = load_columns<T, whole>(x + g * W, count);
      store_columns<T, whole, stream>(y + g * W, (v - mean[g]) * scale[g] + bias[g], count);
    }
  }
}

// Whether every whole vector of the span can be stored past the caches: lines stay aligned.
template <class T>
BNEXPORT_INLINE bool streams(const void* to, Span span) {
  constexpr int64_t size = sizeof(typename T::Storage);
  return reinterpret_cast<uintptr_t>(to) % 64 == 0 && span.stride * size % 64 == 0;
}

template <class T, bool stream>
BNEXPORT_INLINE void normalise_all_columns(const typename T::Storage* x, typename T::Storage* y, Span span,
                                           const ForwardCoefficients* coefficients) {
  constexpr int64_t W = kLanes<T>;
  int64_t c = 0;
  for (; c + kTogether * W <= span.cols; c += kTogether * W) {
    normalise_columns<T, true, kTogether, stream>(x + c, y + c, span.rows, span.stride, W, coefficients + c);
  }
  for (; c + W <= span.cols; c += W) {
    normalise_columns<T, true, 1, stream>(x + c, y + c, span.rows, span.stride, W, coefficients + c);
  }
  if (c < span.cols) {
    normalise_columns<T, false, 1, false>(x + c, y + c, span.rows, span.stride, span.cols - c, coefficients + c);
  }
  if constexpr (stream) stream_fence();
}

template <class T>
void column_normalise(const void* from, void* to, Span span, const ForwardCoefficients* coefficients, bool stream) {
  const auto* x = static_cast<const typename T::Storage*>(from);
  auto* y = static_cast<typename T::Storage*>(to);
  if (stream && streams<T>(to, span)) {
    normalise_all_columns<T, true>(x, y, span, coefficients);
  } else {
    normalise_all_columns<T, false>(x, y, span, coefficients);
  }
}

template <class T, bool whole, int64_t G>
BNEXPORT_INLINE void column_sums_block(const typename T::Storage* dy, const typename T::Storage* x, int64_t rows,
                                       int64_t stride, int64_t count, const double* mean, GradientSums* sums) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  constexpr int64_t W = kLanes<T>;
  V pivot[G] = {}, a[G] = {}, b[G] = {};
  for (int64_t g = 0; g < G; ++g) {
    for (int64_t i = 0; i < count; ++i) pivot[g][i] = static_cast<Compute>(mean[g * W + i]);
  }
  for (int64_t r = 0; r < rows; ++r, x += stride, dy += stride) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) {
      const V d = load_columns<T, whole>(dy + g * W, count);
      a[g] += d;
      b[g] += d * (load_columns<T, whole>(x + g * W, count) - pivot[g]);
    }
  }
  for (int64_t g = 0; g < G; ++g) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = g * W + i;
      const auto sum = static_cast<double>(a[g][i]);
      sums[at].dy += sum;
      sums[at].dy_x_hat += static_cast<double>(b[g][i]) - (mean[at] - static_cast<double>(pivot[g][i])) * sum;
    }
  }
}

template <class T>
void column_gradient_sums(const void* dy_data, const void* x_data, Span span, const double* mean, GradientSums* sums) {
  constexpr int64_t W = kLanes<T>;
  const auto* dy = static_cast<const typename T::Storage*>(dy_data);
  const auto* x = static_cast<const typename T::Storage*>(x_data);
  for (int64_t c = 0; c < span.cols; ++c) sums[c] = {};
  for (int64_t r = 0; r < span.rows; r += kColumnBlock) {
    const int64_t rows = span.rows - r < kColumnBlock ? span.rows - r : kColumnBlock, start = r * span.stride;
    int64_t c = 0;
    for (; c + kTogether * W <= span.cols; c += kTogether * W) {
      column_sums_block<T, true, kTogether>(dy + start + c, x + start + c, rows, span.stride, W, mean + c, sums + c);
    }
    for (; c + W <= span.cols; c += W) {
      column_sums_block<T, true, 1>(dy + start + c, x + start + c, rows, span.stride, W, mean + c, sums + c);
    }
    if (c < span.cols) {
      column_sums_block<T, false, 1>(dy + start + c, x + start + c, rows, span.stride, span.cols - c, mean + c,
                                     sums + c);
    }
  }
}

template <class T, bool whole, bool stream>
BNEXPORT_INLINE void gradient_columns(const typename T::Storage* dy, const typename T::Storage* x,
                                      typename T::Storage* dx, int64_t rows, int64_t stride, int64_t count,
                                      const BackwardCoefficients* c) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  constexpr int64_t G = whole ? kGradientTogether : 1, W = kLanes<T>;
  V mean[G] = {}, scale[G] = {}, offset[G] = {}, slope[G] = {}, rest[G] = {};
  for (int64_t g = 0; g < G; ++g) {
    for (int64_t i = 0; i < count; ++i) {
      const BackwardCoefficients& k = c[g * W + i];
      mean[g][i] = static_cast<Compute>(k.mean);
      scale[g][i] = static_cast<Compute>(k.scale);
      offset[g][i] = static_cast<Compute>(k.offset);
      slope[g][i] = static_cast<Compute>(k.slope);
      rest[g][i] = static_cast<Compute>(k.rest);
    }
  }
  for (int64_t r = 0; r < rows; ++r, x += stride, dy += stride, dx += stride) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) {
      const V d = load_columns<T, whole>(dy + g * W, count), v = load_columns<T, whole>(x + g * W, count);
      store_columns<T, whole, stream>(dx + g * W, ((d - offset[g]) - (v - mean[g]) * slope[g]) * scale[g] + rest[g],
                                      count);
    }
  }
}

template <class T, bool stream>
BNEXPORT_INLINE void gradient_all_columns(const typename T::Storage* dy, const typename T::Storage* x,
                                          typename T::Storage* dx, Span span, const BackwardCoefficients* k) {
  constexpr int64_t W = kLanes<T>, step = kGradientTogether * W;
  int64_t c = 0;
  for (; c + step <= span.cols; c += step) {
    gradient_columns<T, true, stream>(dy + c, x + c, dx + c, span.rows, span.stride, W, k + c);
  }
  for (; c < span.cols; c += W) {
    const int64_t count = span.cols - c < W ? span.cols - c : W;
    gradient_columns<T, false, false>(dy + c, x + c, dx + c, span.rows, span.stride, count, k + c);
  }
  if constexpr (stream) stream_fence();
}

template <class T>
void column_gradient(const void* dy_data, const void* x_data, void* dx_data, Span span, const BackwardCoefficients* k,
                     bool stream) {
  const auto* dy = static_cast<const typename T::Storage*>(dy_data);
  const auto* x = static_cast<const typename T::Storage*>(x_data);
  auto* dx = static_cast<typename T::Storage*>(dx_data);
  if (stream && streams<T>(dx_data, span)) {
    gradient_all_columns<T, true>(dy, x, dx, span, k);
  } else {
    gradient_all_columns<T, false>(dy, x, dx, span, k);
  }
}

}  // namespace
}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_COLUMNS_H
