// The inner loops, one table per element type and instruction set. Sizes and strides in elements.
#ifndef BNEXPORT_KERNELS_CPU_TABLE_H
#define BNEXPORT_KERNELS_CPU_TABLE_H

#include <cstdint>

#include "../moments.h"
#include "../statistics.h"

namespace bnexport::cpu {

// Rows are read in pieces of at least this many values, so that the end of a row can be read as one
// whole vector that overlaps the one before it.
constexpr int64_t kShortestRow = 16;

// Values per block of statistics: 16 KB of float32, read again from L1 when a pivot was bad. With
// 32 lanes a lane sums at most 128 values (tolerances.py counts on that).
constexpr int64_t kBlock = 4096;

// Rows per block of column statistics; the same bound, since there a lane is a column.
constexpr int64_t kColumnBlock = 128;

// `rows` rows of `cols` values, `stride` apart.
struct Span {
  int64_t rows, cols, stride;
};

struct Table {
  int64_t element_size;

  // Rows: all values belong to one channel; cols >= kShortestRow.
  Moments (*moments)(const void* x, Span span);
  void (*normalise)(const void* x, void* y, Span span, const ForwardCoefficients& coefficients, bool stream);
  // {sum dy, sum dy * (x - mean)}
  GradientSums (*gradient_sums)(const void* dy, const void* x, Span span, double mean);
  void (*gradient)(const void* dy, const void* x, void* dx, Span span, const BackwardCoefficients& coefficients,
                   bool stream);

  // Columns: each column has coefficients of its own; any cols >= 0. Results per column.
  void (*column_moments)(const void* x, Span span, double* mean, double* m2);
  void (*column_normalise)(const void* x, void* y, Span span, const ForwardCoefficients* coefficients);
  void (*column_gradient_sums)(const void* dy, const void* x, Span span, const double* mean, GradientSums* sums);
  void (*column_gradient)(const void* dy, const void* x, void* dx, Span span, const BackwardCoefficients* coefficients);
};

// The table for a bnexport_dtype on this processor. The environment variable BNEXPORT_ISA
// (baseline, avx2, avx512) asks for less than the processor has; it is read once.
const Table& table(int32_t dtype);
const char* instruction_set();

}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_TABLE_H
