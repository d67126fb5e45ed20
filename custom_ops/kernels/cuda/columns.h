// An NSC tensor (and NCS with one pixel) is a matrix of R = N * S rows and C columns, one channel each.
//
// A block is `lanes` threads wide and blockDim / lanes high; a thread takes one vector of columns and
// every (blockDim / lanes)-th row of the block's part, kBatch rows at a time. Columns do not mix until the
// threads above each other are merged.
#pragma once

#include "elements.h"
#include "reduction.h"
#include "saved.h"

namespace bnexport::cuda {

constexpr int kColumnBatch = 4;

struct Columns {
  int64_t R = 0, C = 0;
  int64_t part_rows = 0;  // rows of a part
  int tiles = 0;          // blocks side by side
  int lanes = 1;          // threads side by side: a power of two, at most a warp
  int kept_at = 0;        // where blocks that keep their part have it in shared memory
};

// What a thread of a block works on: columns [column, column + width) and rows begin, begin + step, ..
struct Cell {
  int64_t column, begin, end, step;
  int64_t first;  // the part's first row
  bool inside;
};

template <int width>
BNEXPORT_DEVICE Cell cell_of(const Columns& columns, int block) {
  const int lanes = columns.lanes, thread = thread_index();
  const int part = block / columns.tiles;
  const int64_t tile = block - part * columns.tiles;
  Cell cell;
  cell.column = (tile * lanes + thread % lanes) * width;
  cell.inside = cell.column < columns.C;
  cell.first = part * columns.part_rows;
  cell.begin = cell.first + thread / lanes;
  cell.end = (part + 1) * columns.part_rows < columns.R ? (part + 1) * columns.part_rows : columns.R;
  cell.step = thread_count() / lanes;
  if (!cell.inside) cell.begin = cell.end;
  return cell;
}

// kColumnBatch rows of a thread's columns; rows past the end are 0.
template <class E, Reuse reuse>
BNEXPORT_DEVICE void load_rows(const typename E::Storage* data, const Columns& columns, const Cell& cell, int64_t row,
                               typename E::Raw (&raw)[kColumnBatch]) {
#pragma unroll
  for (int i = 0; i < kColumnBatch; ++i) {
    const int64_t r = row + i * cell.step;
    raw[i] = E::template load_if<reuse>(data + r * columns.C + cell.column, r < cell.end);
  }
}

// Where a pass finds rows: in global memory, or in the shared memory that an earlier pass kept them in. Threads
// read back only what they wrote themselves.
template <class E, Reuse reuse>
struct RowsFromGlobal {
  const typename E::Storage* data;

  BNEXPORT_DEVICE void load(const Columns& columns, const Cell& cell, int64_t row,
                            typename E::Raw (&raw)[kColumnBatch]) const {
    load_rows<E, reuse>(data, columns, cell, row, raw);
  }
};
// The slot of a batch's first row; the next ones are a block's threads apart.
BNEXPORT_DEVICE uint32_t kept_slot(const Columns& columns, const Cell& cell, int64_t row) {
  return static_cast<uint32_t>(row - cell.begin) * static_cast<uint32_t>(columns.lanes) +
         static_cast<uint32_t>(thread_index());
}
template <class E>
struct RowsKeeping {
  const typename E::Storage* data;
  typename E::Raw* kept;

  BNEXPORT_DEVICE void load(const Columns& columns, const Cell& cell, int64_t row,
                            typename E::Raw (&raw)[kColumnBatch]) const {
    load_rows<E, Reuse::kNever>(data, columns, cell, row, raw);
    typename E::Raw* slot = kept + kept_slot(columns, cell, row);
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i, slot += thread_count()) {
      if (row + i * cell.step < cell.end) *slot = raw[i];
    }
  }
};
template <class E>
struct RowsKept {
  const typename E::Raw* kept;

  BNEXPORT_DEVICE void load(const Columns& columns, const Cell& cell, int64_t row,
                            typename E::Raw (&raw)[kColumnBatch]) const {
    const typename E::Raw* slot = kept + kept_slot(columns, cell, row);
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i, slot += thread_count()) {
      raw[i] = row + i * cell.step < cell.end ? *slot : typename E::Raw{};
    }
  }
};

// Coefficients of a channel, which another block may have written in this launch.
template <class Coefficients>
BNEXPORT_DEVICE Coefficients load_coefficients(const Coefficients* from) {
  Coefficients k;
  const auto* source = reinterpret_cast<const double*>(from);
  auto* to = reinterpret_cast<double*>(&k);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Coefficients) / sizeof(double)); ++i) {
    to[i] = load_shared_between_blocks(source + i);
  }
  return k;
}

template <class Compute, int width>
struct ColumnMoments {
  Compute count = 0, mean[width] = {}, m2[width] = {};

  BNEXPORT_DEVICE void merge(const ColumnMoments& other) {
    const Compute total = count + other.count;
    const Compute share = total > 0 ? divide_fast(other.count, total) : Compute(0), weight = count * share;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const Compute delta = other.mean[k] - mean[k];
      mean[k] += delta * share;
      m2[k] += other.m2[k] + delta * delta * weight;
    }
    count = total;
  }
};

template <class Compute, int width>
struct ColumnSums {
  Compute dy[width] = {}, dy_x[width] = {};

  BNEXPORT_DEVICE void merge(const ColumnSums& other) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      dy[k] += other.dy[k];
      dy_x[k] += other.dy_x[k];
    }
  }
};

// The threads above each other are merged; the block's first `lanes` threads get the result. Shared memory
// holds a value for each thread of a warp's first row.
template <class Value>
BNEXPORT_DEVICE Value merge_columns(Value value, int lanes) {
  static_assert(sizeof(Value) <= kColumnValueBytes, "fits the shared memory that plans ask for");
  auto* slots = reinterpret_cast<Value*>(shared_memory() + kScratchBytes);
  const int thread = thread_index(), lane = thread % kWarp, warp = thread / kWarp;
  for (int distance = kWarp / 2; distance >= lanes; distance /= 2) value.merge(shuffle_down(value, distance));
  if (lane < lanes) slots[warp * lanes + lane] = value;
  sync_block();
  if (thread < lanes) {
    for (int other = 1; other < thread_count() / kWarp; ++other) value.merge(slots[other * lanes + thread]);
  }
  return value;
}

// One column of a part in double, value by value; for values whose squares leave the range of float.
template <class E>
BNEXPORT_DEVICE Moments wide_column_moments(const typename E::Storage* x, int64_t rows, int64_t stride) {
  Moments all;
#pragma unroll 1
  for (int64_t r = 0; r < rows; ++r) all.merge({1, static_cast<double>(E::load_one(x + r * stride)), 0});
  return all;
}

// The moments of a part of every column, written by the block's first threads: parts[part * C + c].
template <class E, class Source>
BNEXPORT_DEVICE void block_column_moments(const Columns& columns, const typename E::Storage* x, const Source& source,
                                          int block, Moments* parts) {
  using Compute = typename E::Compute;
  constexpr int W = E::kWidth;
  const Cell cell = cell_of<W>(columns, block);
  const int64_t part = block / columns.tiles;
  // The same shift for all threads of a column: from the part's first, middle and last row.
  const int64_t first_row = cell.first;
  const auto sample = [&](int64_t row) {
    return E::template load_if<Reuse::kSoon>(x + row * columns.C + cell.column, cell.inside);
  };
  const auto first = sample(first_row), middle = sample((first_row + cell.end) / 2), last = sample(cell.end - 1);
  Compute shift[W];
#pragma unroll
  for (int k = 0; k < W; ++k) shift[k] = median(E::get(first, k), E::get(middle, k), E::get(last, k));
  ColumnMoments<Compute, W> all;
  for (int64_t row = cell.begin; row < cell.end; row += kColumnBatch * cell.step) {
    typename E::Raw raw[kColumnBatch];
    source.load(columns, cell, row, raw);
    int rows = 1;
#pragma unroll
    for (int i = 1; i < kColumnBatch; ++i) rows += row + i * cell.step < cell.end ? 1 : 0;
    ColumnMoments<Compute, W> batch;
    batch.count = static_cast<Compute>(rows);
    const Compute inverse = 1 / batch.count;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      Compute d[kColumnBatch], sum = 0, square = 0;
#pragma unroll
      for (int i = 0; i < kColumnBatch; ++i) {
        d[i] = i < rows ? E::get(raw[i], k) - shift[k] : Compute(0);
        sum += d[i];
      }
      batch.mean[k] = sum * inverse;
#pragma unroll
      for (int i = 0; i < kColumnBatch; ++i) {
        const Compute e = i < rows ? d[i] - batch.mean[k] : Compute(0);
        square += e * e;
      }
      batch.m2[k] = square;
    }
    all.merge(batch);
  }
  all = merge_columns(all, columns.lanes);
  if (thread_index() >= columns.lanes || !cell.inside) return;
#pragma unroll
  for (int k = 0; k < W; ++k) {
    Moments result{static_cast<double>(all.count), static_cast<double>(shift[k]) + static_cast<double>(all.mean[k]),
                   static_cast<double>(all.m2[k])};
    if (out_of_range(LaneMoments<Compute>{all.count, all.mean[k], all.m2[k]})) {
      result = wide_column_moments<E>(x + first_row * columns.C + cell.column + k, cell.end - first_row, columns.C);
    }
    parts[part * columns.C + cell.column + k] = result;
  }
}

// sum dy and sum dy * x_hat of a part of every column.
template <class E, class Source>
BNEXPORT_DEVICE void block_column_sums(const Columns& columns, const Source& dy, const Source& x,
                                       const bnexport_backward& params, int block, BlockSums* parts) {
  using Compute = typename E::Compute;
  constexpr int W = E::kWidth;
  const Cell cell = cell_of<W>(columns, block);
  Compute pivot[W] = {};
#pragma unroll
  for (int k = 0; k < W; ++k) {
    if (cell.inside) pivot[k] = static_cast<Compute>(saved_mean(params, cell.column + k));
  }
  ColumnSums<Compute, W> all;
  for (int64_t row = cell.begin; row < cell.end; row += kColumnBatch * cell.step) {
    typename E::Raw g[kColumnBatch], v[kColumnBatch];
    dy.load(columns, cell, row, g);
    x.load(columns, cell, row, v);
    ColumnSums<Compute, W> batch;
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i) {
      const bool inside = row + i * cell.step < cell.end;
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const Compute d = E::get(g[i], k);
        batch.dy[k] += d;
        batch.dy_x[k] += inside ? d * (E::get(v[i], k) - pivot[k]) : Compute(0);
      }
    }
    all.merge(batch);
  }
  all = merge_columns(all, columns.lanes);
  if (thread_index() >= columns.lanes || !cell.inside) return;
  const int64_t part = block / columns.tiles;
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const int64_t c = cell.column + k;
    const double sum = static_cast<double>(all.dy[k]), rest = saved_mean(params, c) - static_cast<double>(pivot[k]);
    BlockSums& to = parts[part * columns.C + c];
    to.dy = sum;
    to.dy_x_hat = (static_cast<double>(all.dy_x[k]) - rest * sum) * saved_invstd(params, c);
  }
}

// y = (x - mean) * scale + bias
template <class E, class Source>
BNEXPORT_DEVICE void block_column_normalise(const Columns& columns, const Source& x, typename E::Storage* y,
                                            const ForwardCoefficients* coefficients, int block, bool stream) {
  using Compute = typename E::Compute;
  constexpr int W = E::kWidth;
  const Cell cell = cell_of<W>(columns, block);
  if (!cell.inside) return;
  Compute mean[W], scale[W], bias[W];
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const ForwardCoefficients from = load_coefficients(coefficients + cell.column + k);
    mean[k] = static_cast<Compute>(from.mean);
    scale[k] = static_cast<Compute>(from.scale);
    bias[k] = static_cast<Compute>(from.bias);
  }
  for (int64_t row = cell.begin; row < cell.end; row += kColumnBatch * cell.step) {
    typename E::Raw raw[kColumnBatch];
    x.load(columns, cell, row, raw);
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i) {
      const int64_t r = row + i * cell.step;
      Compute value[W];
#pragma unroll
      for (int k = 0; k < W; ++k) value[k] = (E::get(raw[i], k) - mean[k]) * scale[k] + bias[k];
      E::store_if(y + r * columns.C + cell.column, E::pack(value), r < cell.end, stream);
    }
  }
}

// dx = scale * ((dy - offset) - (x - mean) * slope) + rest
template <class E, class Source>
BNEXPORT_DEVICE void block_column_gradient(const Columns& columns, const Source& dy, const Source& x,
                                           typename E::Storage* dx, const BackwardCoefficients* coefficients, int block,
                                           bool stream) {
  using Compute = typename E::Compute;
  constexpr int W = E::kWidth;
  const Cell cell = cell_of<W>(columns, block);
  if (!cell.inside) return;
  Compute mean[W], scale[W], offset[W], slope[W], rest[W];
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const BackwardCoefficients from = load_coefficients(coefficients + cell.column + k);
    mean[k] = static_cast<Compute>(from.mean);
    scale[k] = static_cast<Compute>(from.scale);
    offset[k] = static_cast<Compute>(from.offset);
    slope[k] = static_cast<Compute>(from.slope);
    rest[k] = static_cast<Compute>(from.rest);
  }
  for (int64_t row = cell.begin; row < cell.end; row += kColumnBatch * cell.step) {
    typename E::Raw g[kColumnBatch], v[kColumnBatch];
    dy.load(columns, cell, row, g);
    x.load(columns, cell, row, v);
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i) {
      const int64_t r = row + i * cell.step;
      Compute value[W];
#pragma unroll
      for (int k = 0; k < W; ++k) {
        value[k] = ((E::get(g[i], k) - offset[k]) - (E::get(v[i], k) - mean[k]) * slope[k]) * scale[k] + rest[k];
      }
      E::store_if(dx + r * columns.C + cell.column, E::pack(value), r < cell.end, stream);
    }
  }
}

}  // namespace bnexport::cuda
