// How a tensor is cut into blocks and tasks: a pure function of its shape and layout.
//
// Blocks fix the order of every sum, so they depend on the shape alone. Tasks only group blocks; they
// may follow the number of threads without changing a bit of the result.
#ifndef BNEXPORT_KERNELS_CPU_PLAN_H
#define BNEXPORT_KERNELS_CPU_PLAN_H

#include <cstdint>

#include "table.h"

namespace bnexport::cpu {

constexpr int64_t kTask = 32768;           // elements that are worth a task of their own
constexpr int64_t kSerial = 16384;         // below this, waking another thread costs more than it saves
constexpr int64_t kFoldedColumns = 64;     // narrow matrices are read several rows at a time
constexpr int64_t kColumnChunk = 1 << 16;  // elements per chunk of a column matrix

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Channel slabs of N rows of S values, `row_stride` = C * S apart.
struct RowPlan {
  int64_t N, C, S;
  int64_t pieces;          // blocks per row when rows are long, else 1
  int64_t rows_per_block;  // rows per block when rows are short, else 1
  int64_t blocks;          // per channel

  RowPlan(int64_t N, int64_t C, int64_t S) : N(N), C(C), S(S) {
    pieces = S > kBlock ? ceil_div(S, kBlock) : 1;
    rows_per_block = S > kBlock ? 1 : kBlock / S;
    blocks = pieces > 1 ? N * pieces : ceil_div(N, rows_per_block);
  }

  // Where piece i of `count` starts in a row: multiples of 16, so that every piece keeps
  // kShortestRow values and 64-byte alignment where the row has it.
  int64_t piece_start(int64_t i, int64_t count) const { return i == count ? S : i * S / count / 16 * 16; }

  // Offset within the channel's slab and extent of a block.
  int64_t block(int64_t b, Span* span) const {
    if (pieces > 1) {
      const int64_t start = piece_start(b % pieces, pieces), stop = piece_start(b % pieces + 1, pieces);
      *span = {1, stop - start, C * S};
      return b / pieces * C * S + start;
    }
    const int64_t row = b * rows_per_block;
    *span = {N - row < rows_per_block ? N - row : rows_per_block, S, C * S};
    return row * C * S;
  }
};

// A matrix whose columns belong to channels: (N * S, C) for NSC, (N, C * S) for NCS with small S.
struct ColumnPlan {
  int64_t C, inner;  // column j belongs to channel (j / inner) % C
  int64_t cols, rows;
  int64_t chunk_rows, chunks;
  int64_t rest_cols, rest_rows;  // rows left over by folding, as one more chunk of the unfolded width

  ColumnPlan(int64_t N, int64_t C, int64_t S, bool channels_last)
      : C(C), inner(channels_last ? 1 : S), cols(channels_last ? C : C * S), rows(channels_last ? N * S : N) {
    rest_cols = cols;
    rest_rows = 0;
    if (cols < kFoldedColumns && cols > 0) {
      const int64_t fold = kFoldedColumns / cols;
      rest_rows = rows % fold;
      rows /= fold;
      cols *= fold;
    }
    chunk_rows = cols > 0 ? ceil_div(ceil_div(kColumnChunk, cols), kColumnBlock) * kColumnBlock : kColumnBlock;
    chunks = ceil_div(rows, chunk_rows);
  }

  int64_t all_chunks() const { return chunks + (rest_rows > 0 ? 1 : 0); }
  // Offset and extent of chunk k; the last one may be the rest.
  int64_t chunk(int64_t k, Span* span) const {
    if (k == chunks) {
      *span = {rest_rows, rest_cols, rest_cols};
      return rows * cols;
    }
    const int64_t row = k * chunk_rows;
    *span = {rows - row < chunk_rows ? rows - row : chunk_rows, cols, cols};
    return row * cols;
  }
  int64_t channel(int64_t column) const { return column / inner % C; }
};

// Single channels-last pixels, and rows too short for a vector, are read as columns.
inline bool reads_columns(int32_t layout, int64_t S) { return layout == BNEXPORT_NSC || S < kShortestRow; }

// Contiguous tasks over the rows (n, c) of an NCS tensor, in memory order.
struct StreamPlan {
  int64_t C, S, row_count, pieces, rows_per_task, tasks;

  StreamPlan(int64_t N, int64_t C, int64_t S) : C(C), S(S), row_count(N * C) {
    pieces = S > kTask ? ceil_div(S, kTask) : 1;
    rows_per_task = S > kTask ? 1 : kTask / S;
    tasks = pieces > 1 ? row_count * pieces : ceil_div(row_count, rows_per_task);
  }

  // body(channel, offset, length) for each stretch of one channel in the task.
  template <class Body>
  void each(int64_t task, const Body& body) const {
    if (pieces > 1) {
      const int64_t row = task / pieces, i = task % pieces;
      const auto start = [&](int64_t k) { return k == pieces ? S : k * S / pieces / 16 * 16; };
      body(row % C, row * S + start(i), start(i + 1) - start(i));
      return;
    }
    const int64_t first = task * rows_per_task;
    const int64_t last = first + rows_per_task < row_count ? first + rows_per_task : row_count;
    for (int64_t row = first; row < last; ++row) body(row % C, row * S, S);
  }
};

}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_PLAN_H
