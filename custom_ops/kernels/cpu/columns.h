// Inner loops over columns (NHWC, and NCHW with few pixels): each lane is a column, so nothing is
// summed across lanes. The statistics are those of rows.h, pivot by column: the column's first value,
// and the second look for a vector of columns is taken when any of its lanes asks for it.
//
// The last, partial vector of a row goes through a small buffer.
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

template <class T, bool whole>
BNEXPORT_INLINE void store_columns(typename T::Storage* to, typename T::Vector value, int64_t count) {
  if constexpr (whole) {
    (void)count;
    T::template store<false>(to, value);
  } else {
    store_part<T>(to, value, count);
  }
}

// One column in double; for blocks whose squares leave the range of the compute type.
template <class T>
Moments column_moments_wide(const typename T::Storage* x, int64_t rows, int64_t stride) {
  Moments result;
  const double n = static_cast<double>(rows);
  double pivot = static_cast<double>(load_part<T>(x, 1)[0]);
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

// One vector of columns over at most kColumnBlock rows, merged into mean and m2, which so far hold
// `before` values.
template <class T, bool whole>
BNEXPORT_INLINE void merge_column_block(const typename T::Storage* x, int64_t rows, int64_t stride, int64_t count,
                                        int64_t before, double* mean, double* m2) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  constexpr int64_t W = kLanes<T>;
  const Compute n = static_cast<Compute>(rows);
  V pivot = load_columns<T, whole>(x, count), s{}, q{};
  for (int attempt = 0; attempt < 2; ++attempt) {
    s = V{};
    q = V{};
    const typename T::Storage* row = x;
    for (int64_t r = 0; r < rows;) {
      V s0{}, q0{};
      for (const int64_t stop = r + kColumnSegment < rows ? r + kColumnSegment : rows; r < stop; ++r, row += stride) {
        const V d = load_columns<T, whole>(row, count) - pivot;
        s0 += d;
        q0 += d * d;
      }
      s += s0;
      q += q0;
    }
    if (attempt == 1) break;
    bool again = false;
    for (int64_t i = 0; i < count; ++i) again |= 3 * s[i] * s[i] > 2 * q[i] * n;
    if (!again) break;
    pivot += s / n;
  }
  for (int64_t i = 0; i < count; ++i) {
    const double nd = static_cast<double>(rows), shift = static_cast<double>(s[i]) / nd;
    const double spread = static_cast<double>(q[i]) - static_cast<double>(s[i]) * shift;
    Moments block{nd, static_cast<double>(pivot[i]) + shift, spread < 0 ? 0 : spread};
    if constexpr (std::is_same_v<Compute, float>) {
      if (!(q[i] < 1e34f && q[i] > 1e-26f)) block = column_moments_wide<T>(x + i, rows, stride);
    }
    Moments all{static_cast<double>(before), mean[i], m2[i]};
    all.merge(block);
    mean[i] = all.mean;
    m2[i] = all.m2;
  }
  (void)W;
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
    for (; c + W <= span.cols; c += W) {
      merge_column_block<T, true>(block + c, rows, span.stride, W, r, mean + c, m2 + c);
    }
    if (c < span.cols) {
      merge_column_block<T, false>(block + c, rows, span.stride, span.cols - c, r, mean + c, m2 + c);
    }
  }
}

template <class T, bool whole>
BNEXPORT_INLINE void normalise_columns(const typename T::Storage* x, typename T::Storage* y, int64_t rows,
                                       int64_t stride, int64_t count, const ForwardCoefficients* c) {
  using Compute = typename T::Compute;
  typename T::Vector mean{}, scale{}, bias{};
  for (int64_t i = 0; i < count; ++i) {
    mean[i] = static_cast<Compute>(c[i].mean);
    scale[i] = static_cast<Compute>(c[i].scale);
    bias[i] = static_cast<Compute>(c[i].bias);
  }
  for (int64_t r = 0; r < rows; ++r, x += stride, y += stride) {
    store_columns<T, whole>(y, (load_columns<T, whole>(x, count) - mean) * scale + bias, count);
  }
}

template <class T>
void column_normalise(const void* from, void* to, Span span, const ForwardCoefficients* coefficients) {
  constexpr int64_t W = kLanes<T>;
  const auto* x = static_cast<const typename T::Storage*>(from);
  auto* y = static_cast<typename T::Storage*>(to);
  int64_t c = 0;
  for (; c + W <= span.cols; c += W) {
    normalise_columns<T, true>(x + c, y + c, span.rows, span.stride, W, coefficients + c);
  }
  if (c < span.cols) {
    normalise_columns<T, false>(x + c, y + c, span.rows, span.stride, span.cols - c, coefficients + c);
  }
}

template <class T, bool whole>
BNEXPORT_INLINE void column_sums_block(const typename T::Storage* dy, const typename T::Storage* x, int64_t rows,
                                       int64_t stride, int64_t count, const double* mean, GradientSums* sums) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  V pivot{}, a{}, b{};
  for (int64_t i = 0; i < count; ++i) pivot[i] = static_cast<Compute>(mean[i]);
  for (int64_t r = 0; r < rows; ++r, x += stride, dy += stride) {
    const V g = load_columns<T, whole>(dy, count);
    a += g;
    b += g * (load_columns<T, whole>(x, count) - pivot);
  }
  for (int64_t i = 0; i < count; ++i) {
    const double sum = static_cast<double>(a[i]);
    sums[i].dy += sum;
    sums[i].dy_x_hat += static_cast<double>(b[i]) - (mean[i] - static_cast<double>(pivot[i])) * sum;
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
    for (; c + W <= span.cols; c += W) {
      column_sums_block<T, true>(dy + start + c, x + start + c, rows, span.stride, W, mean + c, sums + c);
    }
    if (c < span.cols) {
      column_sums_block<T, false>(dy + start + c, x + start + c, rows, span.stride, span.cols - c, mean + c, sums + c);
    }
  }
}

template <class T, bool whole>
BNEXPORT_INLINE void gradient_columns(const typename T::Storage* dy, const typename T::Storage* x,
                                      typename T::Storage* dx, int64_t rows, int64_t stride, int64_t count,
                                      const BackwardCoefficients* c) {
  using Compute = typename T::Compute;
  using V = typename T::Vector;
  V mean{}, scale{}, offset{}, slope{}, rest{};
  for (int64_t i = 0; i < count; ++i) {
    mean[i] = static_cast<Compute>(c[i].mean);
    scale[i] = static_cast<Compute>(c[i].scale);
    offset[i] = static_cast<Compute>(c[i].offset);
    slope[i] = static_cast<Compute>(c[i].slope);
    rest[i] = static_cast<Compute>(c[i].rest);
  }
  for (int64_t r = 0; r < rows; ++r, x += stride, dy += stride, dx += stride) {
    const V g = load_columns<T, whole>(dy, count), v = load_columns<T, whole>(x, count);
    store_columns<T, whole>(dx, ((g - offset) - (v - mean) * slope) * scale + rest, count);
  }
}

template <class T>
void column_gradient(const void* dy_data, const void* x_data, void* dx_data, Span span, const BackwardCoefficients* k) {
  constexpr int64_t W = kLanes<T>;
  const auto* dy = static_cast<const typename T::Storage*>(dy_data);
  const auto* x = static_cast<const typename T::Storage*>(x_data);
  auto* dx = static_cast<typename T::Storage*>(dx_data);
  int64_t c = 0;
  for (; c + W <= span.cols; c += W) {
    gradient_columns<T, true>(dy + c, x + c, dx + c, span.rows, span.stride, W, k + c);
  }
  if (c < span.cols) {
    gradient_columns<T, false>(dy + c, x + c, dx + c, span.rows, span.stride, span.cols - c, k + c);
  }
}

}  // namespace
}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_COLUMNS_H
