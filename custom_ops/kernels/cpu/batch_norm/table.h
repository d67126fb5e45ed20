// The inner loops, one table per element type and instruction set. Sizes and strides in elements.
#pragma once

#include <cstdint>

#include "../../common/moments.h"
#include "../../common/statistics.h"

namespace bnexport::cpu {

// Rows are read in pieces of at least this many values, so that the end of a row can be read as one
// whole vector that overlaps the one before it.
constexpr int64_t kShortestRow = 16;

// Values per block of statistics: 16 KB of float32, read again from L1 when a pivot was bad. With
// 32 lanes a lane sums at most 128 values (tolerances.py counts on that; rows.h does better).
constexpr int64_t kBlock = 4096;

// Rows per block of column statistics; the same bound, since there a lane is a column.
constexpr int64_t kColumnBlock = 128;

// Columns of one call: sums of that many, 12 KB of float32, stay in L1.
constexpr int64_t kMostColumns = 1024;

// Arrays of columns have this many elements to spare: the last vector may reach past the last column.
constexpr int64_t kSpareColumns = 16;

// `rows` rows of `cols` values, `stride` apart.
struct Span {
  int64_t rows, cols, stride;
};

// Coefficients in the compute type of the data (float, or double for float64), an array for each: those of the
// forward are mean, scale and bias, those of the backward mean, scale, offset, slope and rest. Entry c is that
// of channel c, or of column c; `pitch` from array to array.
struct Planes {
  const void* data;
  int64_t pitch;
};

struct Table {
  int64_t element_size;

  // Rows. The values of a row belong to one channel, and the rows of `channels` channels follow each
  // other in memory, so that a call reads long runs: channel c of the call starts at c * span.cols.
  // span.cols >= kShortestRow.
  //
  // moments and gradient_sums take one block of each channel and add it to all[c];
  // gradient_sums adds {sum dy, sum dy * (x - mean[c])}.
  void (*moments)(const void* x, Span span, int64_t channels, Moments* all);
  void (*normalise)(const void* x, void* y, Span span, int64_t channels, const Planes& coefficients, bool stream);
  void (*gradient_sums)(const void* dy, const void* x, Span span, int64_t channels, const double* mean,
                        GradientSums* all);
  void (*gradient)(const void* dy, const void* x, void* dx, Span span, int64_t channels, const Planes& coefficients,
                   bool stream);

  // Columns: each column has a channel of its own; any cols in [0, kMostColumns] for the sums, any number for the
  // others. Results per column, and kSpareColumns behind them. The sums are sum dy and sum dy * (x - mean).
  void (*column_moments)(const void* x, Span span, double* mean, double* m2);
  void (*column_normalise)(const void* x, void* y, Span span, const Planes& coefficients, bool stream);
  void (*column_gradient_sums)(const void* dy, const void* x, Span span, const double* mean, double* dy_sums,
                               double* product_sums);
  void (*column_gradient)(const void* dy, const void* x, void* dx, Span span, const Planes& coefficients, bool stream);

  // all[i].merge(part[i]). Here, and not in the callers, because compilers contract a * b + c differently
  // for each instruction set, and every way through the kernels must give the same bits.
  void (*merge)(Moments* all, const Moments* part, int64_t count);
  // The same for columns of which each has as many values: mean and m2 of `before`, the part's of `count`.
  void (*merge_columns)(double* mean, double* m2, double before, const double* part_mean, const double* part_m2,
                        double count, int64_t cols);
};

// The table for a bnexport_dtype on this processor.
const Table& table(int32_t dtype);

}  // namespace bnexport::cpu
