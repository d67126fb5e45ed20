// Inner loops over columns (NHWC, and NCHW with few pixels): each lane is a column, so nothing is summed across
// lanes. The statistics are those of rows.h, with the column's first value as the pivot of its block; a column
// whose pivot was a bad choice takes a second look.
//
// Rows are read kSegment at a time, each from its first column to its last, so that memory sees a few streams in
// order; sums of a segment are kept in registers, sums of a block in small arrays.
//
// All loops take pieces of columns. What is left at the end of a row is part of a piece that overlaps the one before
// it (its sums stand behind those of the others); matrices with less than a piece of columns are copied to
// rows of one piece.
#pragma once

#include <cstring>

#include "maps.h"

namespace bnexport::cpu {
namespace {

// As kSegment in rows.h: a sum of a segment has this many terms, that of a block 8 of them.
constexpr int64_t kSegmentRows = 16;

// Pieces taken together, with two sums and a pivot for each: four native vectors, or two where a set has 16
// registers and no instruction with three operands.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr int64_t kTogetherBytes = 4 * kNativeBytes;
#else
constexpr int64_t kTogetherBytes = 2 * kNativeBytes;
#endif
template <class T>
constexpr int64_t kTogether = kTogetherBytes / static_cast<int64_t>(sizeof(typename T::Piece));

// Columns as pieces: `whole` columns in pieces of their own, and perhaps one that overlaps.
template <class T>
struct Pieces {
  int64_t cols, whole;

  explicit Pieces(int64_t cols) : cols(cols), whole(cols / kPiece<T> * kPiece<T>) {}
  bool overlaps() const { return whole < cols; }
  // Of the arrays that hold something for each lane.
  int64_t lanes() const { return overlaps() ? whole + kPiece<T> : whole; }
  // The column of a lane.
  int64_t column(int64_t lane) const { return lane < whole ? lane : cols - kPiece<T> + lane - whole; }
  // Moves the values of the overlapping piece's last columns to where they belong.
  template <class Value>
  void settle(Value* values) const {
    if (overlaps()) {
      std::memmove(values + whole, values + whole + kPiece<T> - (cols - whole),
                   static_cast<size_t>(cols - whole) * sizeof(Value));
    }
  }
};

// visit(column, index of the lane, how many pieces) over all pieces.
template <class T, class Visit>
BNEXPORT_INLINE void each_piece(const Pieces<T>& pieces, const Visit& visit) {
  constexpr int64_t w = kPiece<T>, G = kTogether<T>;
  int64_t c = 0;
  for (; c + G * w <= pieces.whole; c += G * w) visit(c, c, std::integral_constant<int64_t, G>{});
  for (; c < pieces.whole; c += w) visit(c, c, std::integral_constant<int64_t, 1>{});
  if (pieces.overlaps()) visit(pieces.cols - w, c, std::integral_constant<int64_t, 1>{});
}

// Two sums of each column of a block.
template <class T>
struct ColumnSums {
  using Compute = typename T::Compute;
  alignas(64) Compute pivot[kMostColumns + 16];
  alignas(64) Compute first[kMostColumns + 16];
  alignas(64) Compute second[kMostColumns + 16];
};

// Adds the sums of at most kSegmentRows rows of G pieces. Terms gives those of a piece of a row.
template <class T, int64_t G, class Terms>
BNEXPORT_INLINE void add_segment(const Terms& terms, int64_t row, int64_t last, ColumnSums<T>& sums, int64_t column,
                                 int64_t lane) {
  using P = typename T::Piece;
  using A = Plane<T>;
  constexpr int64_t w = kPiece<T>;
  P pivot[G], first[G], second[G];
#pragma GCC unroll 4
  for (int64_t g = 0; g < G; ++g) {
    pivot[g] = load<A, P>(sums.pivot + lane + g * w);
    first[g] = second[g] = P{};
  }
  for (; row < last; ++row) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) terms.template add<P>(row, column + g * w, pivot[g], first[g], second[g]);
  }
#pragma GCC unroll 4
  for (int64_t g = 0; g < G; ++g) {
    const int64_t at = lane + g * w;
    store<A, false>(sums.first + at, load<A, P>(sums.first + at) + first[g]);
    store<A, false>(sums.second + at, load<A, P>(sums.second + at) + second[g]);
  }
}

template <class T, class Terms>
BNEXPORT_INLINE void add_block(const Terms& terms, int64_t rows, const Pieces<T>& pieces, ColumnSums<T>& sums) {
  const auto size = static_cast<size_t>(pieces.lanes()) * sizeof(typename T::Compute);
  std::memset(sums.first, 0, size);
  std::memset(sums.second, 0, size);
  for (int64_t row = 0; row < rows; row += kSegmentRows) {
    const int64_t last = row + kSegmentRows < rows ? row + kSegmentRows : rows;
    each_piece(pieces, [&](int64_t column, int64_t lane, auto together) __attribute__((always_inline)) {
      add_segment<T, decltype(together)::value>(terms, row, last, sums, column, lane);
    });
  }
}

// d and d^2 with d = x - pivot.
template <class T>
struct PivotTerms {
  const typename T::Storage* x;
  int64_t stride;
  template <class P>
  BNEXPORT_INLINE void add(int64_t row, int64_t column, const P& pivot, P& s, P& q) const {
    const P d = load<T, P>(x + row * stride + column) - pivot;
    s += d;
    q += d * d;
  }
};

// sum dy and sum dy * (x - pivot)
template <class T>
struct GradientTerms {
  const typename T::Storage *dy, *x;
  int64_t stride;
  template <class P>
  BNEXPORT_INLINE void add(int64_t row, int64_t column, const P& pivot, P& a, P& b) const {
    const P g = load<T, P>(dy + row * stride + column);
    a += g;
    b += g * (load<T, P>(x + row * stride + column) - pivot);
  }
};

// The rows of a block, those of less than a piece as rows of one piece in memory of their own.
template <class T>
struct Block {
  using Storage = typename T::Storage;
  const Storage* data;
  int64_t stride;
  Storage narrow[kColumnBlock * kPiece<T>];

  BNEXPORT_INLINE Block(const Storage* from, int64_t rows, Span span) : data(from), stride(span.stride) {
    if (span.cols < kPiece<T>) widen(rows, span);
  }

 private:
  BNEXPORT_OUTLINE void widen(int64_t rows, Span span) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < kPiece<T>; ++c) narrow[r * kPiece<T> + c] = data[r * span.stride + c % span.cols];
    }
    data = narrow;
    stride = kPiece<T>;
  }
};

template <class T>
BNEXPORT_INLINE Pieces<T> pieces_of(Span span) {
  return Pieces<T>(span.cols < kPiece<T> ? kPiece<T> : span.cols);
}

// visit(first row, rows) for each block.
template <class Visit>
BNEXPORT_INLINE void each_block(Span span, const Visit& visit) {
  for (int64_t r = 0; r < span.rows; r += kColumnBlock) {
    visit(r, span.rows - r < kColumnBlock ? span.rows - r : kColumnBlock);
  }
}

// A native vector of columns of float data in double: for blocks whose squares leave the range of float.
template <class T>
BNEXPORT_OUTLINE void wide_column_moments(const typename T::Storage* x, int64_t rows, int64_t stride, double* mean,
                                          double* m2) {
  using D = Pack<NativeD, 2>;
  const auto n = static_cast<double>(rows);
  double pivot[kFloats], s[kFloats], q[kFloats];
  store<Float64, false>(pivot, doubles(load<T, Pack<NativeF, 1>>(x)));
  for (bool again = true, first = true; again; first = false) {
    const auto at = load<Float64, D>(pivot);
    D sum{}, squares{};
    for (int64_t r = 0; r < rows; ++r) {
      const auto d = doubles(load<T, Pack<NativeF, 1>>(x + r * stride)) - at;
      sum += d;
      squares += d * d;
    }
    store<Float64, false>(s, sum);
    store<Float64, false>(q, squares);
    again = false;
    for (int64_t i = 0; i < kFloats; ++i) {
      mean[i] = pivot[i] + s[i] / n;
      m2[i] = q[i] - s[i] * (s[i] / n);
      if (m2[i] < 0) m2[i] = 0;
      if (first && 3 * s[i] * s[i] > 2 * q[i] * n) {
        pivot[i] = mean[i];
        again = true;
      }
    }
  }
}

// The sums of a block once more where a pivot was more than sqrt(2) standard deviations off, as in rows.h.
template <class T>
BNEXPORT_OUTLINE void look_again(const PivotTerms<T>& terms, int64_t rows, const Pieces<T>& pieces,
                                 ColumnSums<T>& sums) {
  using A = Plane<T>;
  using N = typename A::Piece;
  const auto n = static_cast<typename T::Compute>(rows);
  for (int64_t lane = 0; lane < pieces.lanes(); lane += kPiece<T>) {
    bool again = false;
    for (int64_t i = lane; i < lane + kPiece<T>; i += N::kLanes) {
      const auto s = load<A, N>(sums.first + i).value, q = load<A, N>(sums.second + i).value;
      const auto off = 3 * s * s > 2 * q * n;
      if (!any(off)) continue;
      const auto pivot = load<A, N>(sums.pivot + i).value;
      store<A, false>(sums.pivot + i, N{off ? pivot + s / n : pivot});
      again = true;
    }
    if (!again) continue;
    store<A, false>(sums.first + lane, typename T::Piece{});
    store<A, false>(sums.second + lane, typename T::Piece{});
    for (int64_t row = 0; row < rows; row += kSegmentRows) {
      const int64_t last = row + kSegmentRows < rows ? row + kSegmentRows : rows;
      add_segment<T, 1>(terms, row, last, sums, pieces.column(lane), lane);
    }
  }
}

// Merges a block's mean and M2 into those of the `before` rows above it.
template <class T>
BNEXPORT_OUTLINE void merge_block(const PivotTerms<T>& terms, int64_t rows, int64_t before, const Pieces<T>& pieces,
                                  const ColumnSums<T>& sums, double* mean, double* m2) {
  using A = Plane<T>;
  using N = typename A::Piece;
  using D = decltype(doubles(N{}));
  const auto n = static_cast<double>(rows), share = n / static_cast<double>(before + rows);
  const auto inverse = fill<D>(1 / n);
  for (int64_t lane = 0; lane < pieces.lanes(); lane += N::kLanes) {
    const auto q = load<A, N>(sums.second + lane);
    const D s = doubles(load<A, N>(sums.first + lane)), shift = s * inverse;
    D block_mean = doubles(load<A, N>(sums.pivot + lane)) + shift, block_m2 = not_negative(doubles(q) - s * shift);
    if constexpr (std::is_same_v<N, Pack<NativeF, 1>>) {
      // As in rows.h: squares that are infinite, denormal or NaN, and columns of equal values.
      const NativeI good = (q.value < 1e34F) & (q.value > 1e-26F);
      if (any(~good)) {
        double wide_mean[kFloats], wide_m2[kFloats], means[kFloats], m2s[kFloats];
        wide_column_moments<T>(terms.x + pieces.column(lane), rows, terms.stride, wide_mean, wide_m2);
        store<Float64, false>(means, block_mean);
        store<Float64, false>(m2s, block_m2);
        for (int64_t i = 0; i < kFloats; ++i) {
          if (good[i] != 0) continue;
          means[i] = wide_mean[i];
          m2s[i] = wide_m2[i];
        }
        block_mean = load<Float64, D>(means);
        block_m2 = load<Float64, D>(m2s);
      }
    }
    if (before > 0) {
      const D old = load<Float64, D>(mean + lane), delta = block_mean - old;
      block_mean = old + delta * fill<D>(share);
      block_m2 =
          load<Float64, D>(m2 + lane) + (block_m2 + delta * delta * fill<D>(static_cast<double>(before) * share));
    }
    store<Float64, false>(mean + lane, block_mean);
    store<Float64, false>(m2 + lane, block_m2);
  }
}

template <class T>
void column_moments(const void* data, Span span, double* mean, double* m2) {
  const auto* x = static_cast<const typename T::Storage*>(data);
  const Pieces<T> pieces = pieces_of<T>(span);
  ColumnSums<T> sums;
  each_block(span, [&](int64_t first, int64_t rows) {
    const Block<T> block(x + first * span.stride, rows, span);
    const PivotTerms<T> terms{block.data, block.stride};
    each_piece(pieces, [&](int64_t column, int64_t lane, auto together) {
      for (int64_t c = 0; c < decltype(together)::value * kPiece<T>; c += kPiece<T>) {
        store<Plane<T>, false>(sums.pivot + lane + c, load<T, typename T::Piece>(block.data + column + c));
      }
    });
    add_block(terms, rows, pieces, sums);
    look_again(terms, rows, pieces, sums);
    merge_block(terms, rows, first, pieces, sums, mean, m2);
  });
  pieces.settle(mean);
  pieces.settle(m2);
}

template <class T>
BNEXPORT_OUTLINE void set_pivots(ColumnSums<T>& sums, const Pieces<T>& pieces, Span span, const double* mean) {
  for (int64_t lane = 0; lane < pieces.lanes(); ++lane) {
    sums.pivot[lane] = static_cast<typename T::Compute>(mean[pieces.column(lane) % span.cols]);
  }
}

// Adds a block's sums to those of the `before` rows above it.
template <class T>
BNEXPORT_OUTLINE void add_sums(const ColumnSums<T>& sums, const Pieces<T>& pieces, int64_t before, double* dy_sums,
                               double* product_sums) {
  using A = Plane<T>;
  using N = typename A::Piece;
  using D = decltype(doubles(N{}));
  for (int64_t lane = 0; lane < pieces.lanes(); lane += N::kLanes) {
    const D none{};
    const D dy = before > 0 ? load<Float64, D>(dy_sums + lane) : none;
    const D product = before > 0 ? load<Float64, D>(product_sums + lane) : none;
    store<Float64, false>(dy_sums + lane, dy + doubles(load<A, N>(sums.first + lane)));
    store<Float64, false>(product_sums + lane, product + doubles(load<A, N>(sums.second + lane)));
  }
}

template <class T>
BNEXPORT_OUTLINE void correct_products(Span span, const double* mean, const double* dy_sums, double* product_sums) {
  for (int64_t c = 0; c < span.cols; ++c) {
    const auto pivot = static_cast<typename T::Compute>(mean[c]);
    product_sums[c] -= (mean[c] - static_cast<double>(pivot)) * dy_sums[c];
  }
}

template <class T>
void column_gradient_sums(const void* dy_data, const void* x_data, Span span, const double* mean, double* dy_sums,
                          double* product_sums) {
  const auto* dy = static_cast<const typename T::Storage*>(dy_data);
  const auto* x = static_cast<const typename T::Storage*>(x_data);
  const Pieces<T> pieces = pieces_of<T>(span);
  ColumnSums<T> sums;
  set_pivots(sums, pieces, span, mean);
  each_block(span, [&](int64_t first, int64_t rows) {
    const Block<T> g(dy + first * span.stride, rows, span), v(x + first * span.stride, rows, span);
    add_block(GradientTerms<T>{g.data, v.data, g.stride}, rows, pieces, sums);
    add_sums(sums, pieces, first, dy_sums, product_sums);
  });
  pieces.settle(dy_sums);
  pieces.settle(product_sums);
  correct_products<T>(span, mean, dy_sums, product_sums);
}

// R rows of y, each column with its own coefficients. Where a piece overlaps the one before it, its results are
// computed first: y may be an input.
template <class T, bool stream, int64_t R, class Map>
BNEXPORT_INLINE void map_some_rows(const Map& map, typename T::Storage* y, int64_t row, int64_t stride,
                                   const Pieces<T>& pieces) {
  using P = typename T::Piece;
  typename T::Storage kept[R][kPiece<T>];
  const int64_t last = pieces.cols - kPiece<T>;
  if (pieces.overlaps()) {
    const auto k = map.template channels<P>(last);
    for (int64_t r = 0; r < R; ++r) store<T, false>(kept[r], map.at((row + r) * stride + last, k));
  }
  for (int64_t c = 0; c < pieces.whole; c += kPiece<T>) {
    const auto k = map.template channels<P>(c);
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r) {
      const int64_t at = (row + r) * stride + c;
      store<T, stream>(y + at, map.at(at, k));
    }
  }
  if (pieces.overlaps()) {
    for (int64_t r = 0; r < R; ++r) std::memcpy(y + (row + r) * stride + last, kept[r], sizeof(kept[r]));
  }
}

template <class T, bool stream, class Map>
BNEXPORT_INLINE void map_all_columns(const Map& map, typename T::Storage* y, Span span) {
  // As many as leave a pointer to each row and each array of coefficients in a register.
  constexpr int64_t R = !T::kUnrolls ? 1 : Map::kInputs == 1 ? 4 : 2;
  const Pieces<T> pieces(span.cols);
  int64_t row = 0;
  for (; row + R <= span.rows; row += R) map_some_rows<T, stream, R>(map, y, row, span.stride, pieces);
  for (; R > 1 && row < span.rows; ++row) map_some_rows<T, stream, 1>(map, y, row, span.stride, pieces);
  if (stream) stream_fence();
}

// Whether every whole piece of the span can be stored past the caches, line after line.
template <class T>
BNEXPORT_INLINE bool streams(const void* to, Span span) {
  constexpr int64_t size = sizeof(typename T::Storage);
  return reinterpret_cast<uintptr_t>(to) % 64 == 0 && span.stride * size % 64 == 0;
}

// Rows of less than a piece.
template <class T, class Map>
BNEXPORT_OUTLINE void map_narrow_rows(const Map& map, typename T::Storage* y, Span span) {
  const auto k = map.template channels<typename T::Piece>(0);
  for (int64_t r = 0; r < span.rows; ++r) map_part<T>(map, y, r * span.stride, span.cols, k);
}

template <class T, class Map>
BNEXPORT_INLINE void map_columns(const Map& map, void* to, Span span, bool stream) {
  auto* y = static_cast<typename T::Storage*>(to);
  if (span.cols < kPiece<T>) {
    map_narrow_rows<T>(map, y, span);
  } else if (stream && streams<T>(to, span)) {
    map_all_columns<T, true>(map, y, span);
  } else {
    map_all_columns<T, false>(map, y, span);
  }
}

template <class T>
void column_normalise(const void* x, void* y, Span span, const Planes& coefficients, bool stream) {
  map_columns<T>(Normalise<T>(x, coefficients), y, span, stream);
}

template <class T>
void column_gradient(const void* dy, const void* x, void* dx, Span span, const Planes& coefficients, bool stream) {
  map_columns<T>(Gradient<T>(dy, x, coefficients), dx, span, stream);
}

// Merges columns of `count` values each into those of `before`.
inline void merge_columns(double* __restrict mean, double* __restrict m2, double before,
                          const double* __restrict part_mean, const double* __restrict part_m2, double count,
                          int64_t cols) {
  const double share = count / (before + count), weight = before * share;
  for (int64_t c = 0; c < cols; ++c) {
    const double delta = part_mean[c] - mean[c];
    mean[c] += delta * share;
    m2[c] += part_m2[c] + delta * delta * weight;
  }
}

}  // namespace
}  // namespace bnexport::cpu
