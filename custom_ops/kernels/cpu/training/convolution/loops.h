// The inner loops of convolutions, one table per instruction set. Sizes and strides in floats.
#pragma once

#include <cstdint>

namespace bnexport::cpu {

constexpr int kMostTileRows = 8;  // of a tile, in any instruction set
constexpr int kMostVectors = 3;   // a tile's width

// Loads and stores go past the end of a run by less than this.
constexpr int64_t kSlack = 16;

// A run of columns: `length` of them from `column` on, at `source` in the planes and at `target` in the
// output.
struct Run {
  int64_t column, length, source, target;
};

// How a tile walks the values that are broadcast: `inner` neighbours, `middle` times `pitch` apart, all
// that `outer` times `jump` apart. The panel is walked without gaps, but for `skipped` floats after each outer step.
struct Walk {
  int64_t inner, middle, pitch, outer, jump, skipped;
};

struct Loops {
  int64_t rows;        // of a tile
  int64_t short_rows;  // of a short tile, for the end of the rows
  int64_t lanes;       // of a vector

  // c (rows, vectors * lanes) += a b. Row r of a starts at a[r] and is walked; b is (steps of the walk,
  // vectors * lanes). A sum starts at 0 in each call: long sums are made of partial ones.
  using Tile = void(const float* const* a, const Walk& walk, const float* b, float* c);
  Tile* tile[kMostVectors + 1];
  Tile* short_tile[kMostVectors + 1];

  // packed (count, width): row k holds the runs at source + offsets[k]. Reads past a run where that ends
  // before `limit`, and writes up to kSlack past the end.
  void (*pack)(const float* source, const int64_t* offsets, int64_t count, const Run* runs, int64_t run_count,
               int64_t width, const float* limit, float* packed);

  // packed (count, width): column c holds the `count` values at source + offsets[c], columns <= width; the rest is
  // zero.
  void (*transpose)(const float* source, const int64_t* offsets, int64_t columns, int64_t count, int64_t width,
                    float* packed);

  // y[i] = start + sum over taps of weights[t] * x[offsets[t] + i] for i in [0, count); reads and writes up to
  // 4 * kSlack past it.
  void (*correlate)(const float* x, const int64_t* offsets, const float* weights, int64_t taps, float start,
                    int64_t count, float* y);

  // sums[t] += sum_i g[i] * x[offsets[t] + i]; reads g and x up to kSlack past count, where g must be zero.
  void (*correlations)(const float* g, const float* x, const int64_t* offsets, int64_t taps, int64_t count,
                       double* sums);
};

// The table for this processor.
const Loops& loops();

}  // namespace bnexport::cpu
