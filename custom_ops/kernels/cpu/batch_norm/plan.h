// Division of a tensor into blocks and tasks: a pure function of its shape and layout.
//
// Blocks fix the order of every sum, so they depend on the shape alone. Tasks only group blocks; they
// may follow the number of threads without changing a bit of the result.
#pragma once

#include <cstdint>

#include "../../common/math.h"
#include "../processor.h"
#include "table.h"

namespace bnexport::cpu {

constexpr int64_t kTask = 32768;           // elements that are worth a task of their own
constexpr int64_t kFoldedColumns = 64;     // narrow matrices are read several rows at a time
constexpr int64_t kColumnChunk = 1 << 16;  // elements per chunk of a column matrix
constexpr int64_t kWideBand = 8192;        // columns of a task of the second pass

constexpr int64_t kShortestRun = 1 << 15;  // below this, two passes in order are faster than one in stretches

constexpr int64_t kLongRow = 1024;  // values

constexpr int64_t kMostChannels = 256;  // of a task that takes channels one group at a time
constexpr int64_t kMostRows = 64;       // rows of a block: each is a stream of its own for the prefetcher

// An NCS tensor as rows (n, c) of S values; the slab of a channel is N rows, C * S apart.
struct RowPlan {
  int64_t N, C, S;
  int64_t pieces;          // blocks per row when rows are long, else 1
  int64_t rows_per_block;  // rows per block when rows are short, else 1
  int64_t blocks;          // per channel

  RowPlan(int64_t N, int64_t C, int64_t S) : N(N), C(C), S(S) {
    pieces = S > kBlock ? ceil_div(S, kBlock) : 1;
    rows_per_block = S > kBlock ? 1 : kBlock / S;
    if (rows_per_block > kMostRows) rows_per_block = kMostRows;
    blocks = pieces > 1 ? N * pieces : ceil_div(N, rows_per_block);
  }

  // Where piece i starts in a row: multiples of 16, so that every piece keeps kShortestRow values and
  // 64-byte alignment where the row has it.
  int64_t piece_start(int64_t i) const { return i == pieces ? S : i * S / pieces / 16 * 16; }

  // The blocks of channels [first, last), in memory order; each channel's come in order.
  // visit(block, offset, span, channel, channels)
  template <class Visit>
  void each_block(int64_t first, int64_t last, const Visit& visit) const {
    if (pieces == 1) {
      for (int64_t b = 0; b < blocks; ++b) visit_rows(b, first, last, visit);
      return;
    }
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t c = first; c < last; ++c) visit_pieces(n, c, 0, pieces, visit);
    }
  }

  // The same blocks as tasks of about kTask elements, for when channels are not taken by groups.
  int64_t channels_per_task() const { return ceil_div(kTask, rows_per_block * S); }
  int64_t pieces_per_task() const { return kTask / kBlock; }
  int64_t tasks() const {
    return pieces == 1 ? blocks * ceil_div(C, channels_per_task()) : N * C * ceil_div(pieces, pieces_per_task());
  }
  template <class Visit>
  void each_block_of_task(int64_t task, const Visit& visit) const {
    if (pieces == 1) {
      const int64_t parts = ceil_div(C, channels_per_task()), first = task % parts * channels_per_task();
      visit_rows(task / parts, first, first + channels_per_task() < C ? first + channels_per_task() : C, visit);
      return;
    }
    const int64_t parts = ceil_div(pieces, pieces_per_task()), row = task / parts;
    const int64_t first = task % parts * pieces_per_task(), last = first + pieces_per_task();
    visit_pieces(row / C, row % C, first, last < pieces ? last : pieces, visit);
  }

 private:
  template <class Visit>
  void visit_rows(int64_t b, int64_t first, int64_t last, const Visit& visit) const {
    const int64_t n = b * rows_per_block, rows = N - n < rows_per_block ? N - n : rows_per_block;
    visit(b, (n * C + first) * S, Span{rows, S, C * S}, first, last - first);
  }
  template <class Visit>
  void visit_pieces(int64_t n, int64_t c, int64_t first, int64_t last, const Visit& visit) const {
    for (int64_t i = first; i < last; ++i) {
      const int64_t start = piece_start(i), length = piece_start(i + 1) - start;
      visit(n * pieces + i, (n * C + c) * S + start, Span{1, length, length}, c, int64_t{1});
    }
  }
};

// How the channels of one process are taken.
//
// A group of channels whose slab stays in cache is read from memory once: statistics, then output. That
// pays when the slab fits a core's own cache. It also pays when the tensor does not fit the shared one,
// if rows are long enough for memory to deliver at full speed (each stretch costs a page walk and a fresh
// prefetch: 12 KB stretches ran at less than half the speed of 100 KB). Else all statistics come
// first, then the output, both in the order of memory: with everything in the shared cache and rows of
// kLongRow or more, that beats reuse in stretches (8 MB: 0.49 against 0.67 ms). Shorter rows cost more
// to walk, and for them one walk by groups is better (7 x 7 pixels: 0.12 against 0.20 ms).
struct GroupPlan {
  int64_t channels = 0;  // per group; 0: two passes
  int64_t groups = 0;

  // `tensors`: how many are read (1 forward, 2 backward).
  GroupPlan(const RowPlan& plan, int64_t element_size, int64_t tensors, int64_t width, const Caches& caches) {
    const int64_t row = plan.S * element_size, elements = plan.N * plan.C * plan.S;
    const int64_t slab = plan.N * row * tensors;  // of one channel
    const bool large = !caches.hold((tensors + 1) * elements * element_size);
    int64_t most = elements < kSerial ? plan.C : plan.C / (2 * width);  // leaves work for all threads
    if (most > kMostChannels) most = kMostChannels;
    int64_t wanted = caches.own / 2 / slab;
    if (large && wanted < ceil_div(kRun, row)) wanted = ceil_div(kRun, row);
    if (wanted > most) wanted = most;
    const bool few = plan.N == 1 || elements < kSerial;  // one stretch per group, or nothing to gain
    if (!large && plan.N > 2 && plan.S >= kLongRow) return;
    if (wanted < 1 || wanted * slab > caches.shared / 4 || (!few && wanted * row < kShortestRun)) return;
    channels = wanted;
    groups = ceil_div(plan.C, channels);
  }
};

// A matrix whose columns belong to channels: (N * S, C) for NSC, (N, C * S) for NCS with small S.
//
// Rows are cut into chunks, whose statistics are merged in order: they depend on the shape alone. Columns are cut
// into bands of whole channels, which change no bit. A narrow matrix is folded: several rows are read as
// one, so that rows are at least kFoldedColumns long and, where that leaves enough of them, whole cache lines.
struct ColumnPlan {
  int64_t C, inner;  // column j belongs to channel (j / inner) % C
  int64_t cols, rows;
  int64_t fold = 1;
  int64_t chunk_rows, chunks;
  int64_t rest_cols, rest_rows;  // rows left over by folding, as one more chunk of the unfolded width

  ColumnPlan(int64_t N, int64_t C, int64_t S, bool channels_last, int64_t element_size)
      : C(C), inner(channels_last ? 1 : S), cols(channels_last ? C : C * S), rows(channels_last ? N * S : N) {
    rest_cols = cols;
    rest_rows = 0;
    if (cols > 0) {
      if (cols < kFoldedColumns) fold = kFoldedColumns / cols;
      int64_t aligned = fold;
      while (aligned * cols * element_size % 64 != 0) ++aligned;
      if (aligned * cols <= kMostColumns && rows >= aligned * kColumnBlock) fold = aligned;
      rest_rows = rows % fold;
      rows /= fold;
      cols *= fold;
    }
    chunk_rows = cols > 0 ? ceil_div(ceil_div(kColumnChunk, cols), kColumnBlock) * kColumnBlock : kColumnBlock;
    chunks = ceil_div(rows, chunk_rows);
  }

  int64_t all_chunks() const { return chunks + (rest_rows > 0 ? 1 : 0); }
  int64_t rows_of(int64_t k) const {
    if (k == chunks) return rest_rows;
    return rows - k * chunk_rows < chunk_rows ? rows - k * chunk_rows : chunk_rows;
  }
  // The rows of chunk k in columns [first, first + count), and where they start; the last chunk may be the rest.
  int64_t chunk(int64_t k, int64_t first, int64_t count, Span* span) const {
    if (k == chunks) {
      *span = {rest_rows, rest_cols, rest_cols};
      return rows * cols;
    }
    *span = {rows_of(k), count, cols};
    return k * chunk_rows * cols + first;
  }

  // The second pass, which may be cut anywhere: tasks of some rows each, the rest with the last one.
  int64_t rows_per_task() const { return cols > 0 ? (kTask / cols + 4) / 4 * 4 : 4; }
  int64_t tasks() const { return rows > 0 ? ceil_div(rows, rows_per_task()) : 1; }
  // visit(offset, span)
  template <class Visit>
  void each_span(int64_t task, int64_t first, int64_t count, const Visit& visit) const {
    const int64_t row = task * rows_per_task();
    if (row < rows) {
      visit(row * cols + first, Span{rows - row < rows_per_task() ? rows - row : rows_per_task(), count, cols});
    }
    if (rest_rows > 0 && task == tasks() - 1) visit(rows * cols, Span{rest_rows, rest_cols, rest_cols});
  }
  // All rows at once.
  template <class Visit>
  void each_slab_span(int64_t first, int64_t count, const Visit& visit) const {
    if (rows > 0) visit(first, Span{rows, count, cols});
    if (rest_rows > 0) visit(rows * cols, Span{rest_rows, rest_cols, rest_cols});
  }

  int64_t columns_of(int64_t channels) const { return channels * inner * fold; }
  // Channels of a band of at most `columns` columns (one channel at least): all of a folded matrix, else a
  // number that keeps bands aligned.
  int64_t band_channels(int64_t columns) const {
    if (cols <= columns || fold > 1) return C;
    const int64_t channels = columns / inner;
    return channels >= 16 ? channels / 16 * 16 : channels;
  }
  // Channels of a band whose columns are taken from the first statistic to the last output, so that the second
  // look at them finds a core's own cache; 0 where even narrow bands are too long for that.
  int64_t slab_channels(int64_t bytes_per_value, int64_t width, const Caches& caches) const {
    int64_t columns = rows > 0 ? caches.own / 2 / (rows * bytes_per_value) : cols;
    if (columns < kFoldedColumns && columns < cols) return 0;
    const int64_t each = ceil_div(rows * cols, 2 * width) / (rows > 0 ? rows : 1);  // leaves work for all threads
    if (rows * cols >= kSerial && columns > each) columns = each > kFoldedColumns ? each : kFoldedColumns;
    return band_channels(columns < kMostColumns ? columns : kMostColumns);
  }
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

  // visit(offset, length of a row, channel, channels) for each stretch of whole rows, or piece of one.
  template <class Visit>
  void each(int64_t task, const Visit& visit) const {
    if (pieces > 1) {
      const int64_t row = task / pieces, i = task % pieces;
      const auto start = [&](int64_t k) { return k == pieces ? S : k * S / pieces / 16 * 16; };
      visit(row * S + start(i), start(i + 1) - start(i), row % C, int64_t{1});
      return;
    }
    const int64_t last = (task + 1) * rows_per_task < row_count ? (task + 1) * rows_per_task : row_count;
    for (int64_t row = task * rows_per_task; row < last;) {
      const int64_t c = row % C, channels = C - c < last - row ? C - c : last - row;
      visit(row * S, S, c, channels);
      row += channels;
    }
  }
};

}  // namespace bnexport::cpu
