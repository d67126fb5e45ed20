// Shared parts of the matrix products of convolutions: panels of columns, planes of the input, memory.
#pragma once

#include <algorithm>

#include "../../../common/math.h"
#include "convolution.h"
#include "loops.h"
#include "planes.h"

namespace bnexport::cpu {

// Steps of a sum between packing and packing: 48 KB of panel.
constexpr int64_t kPanelSteps = 256;

// A range: of taps, row-major, or of positions.
struct Taps {
  int64_t first, last;
  bool empty() const { return first == last; }
  bool operator==(const Taps& other) const { return first == other.first && last == other.last; }
};
// From the first of both to the last of both.
inline Taps join(const Taps& a, const Taps& b) {
  if (a.empty() || b.empty()) return a.empty() ? b : a;
  return {std::min(a.first, b.first), std::max(a.last, b.last)};
}

inline int64_t taps(const Convolution& s) { return s.depth.kernel * s.kernel.h * s.kernel.w; }
inline int64_t pixels(const Pair& extents) { return extents.h * extents.w; }
inline int64_t pixels_in(const Convolution& s) { return s.depth.in * pixels(s.in); }
inline int64_t pixels_out(const Convolution& s) { return s.depth.out * pixels(s.out); }
// Positions of a kernel in one dimension that see a value of x from position `at` of y.
inline Taps seen_along(int64_t in, int64_t kernel, int64_t stride, int64_t dilation, int64_t padding, int64_t at) {
  const int64_t start = at * stride - padding;
  const int64_t first = std::clamp<int64_t>(ceil_div(-start, dilation), 0, kernel);
  return {first, std::clamp<int64_t>(ceil_div(in - start, dilation), first, kernel)};
}
inline Taps seen_by_slice(const Convolution& s, int64_t z) {
  return seen_along(s.depth.in, s.depth.kernel, s.depth.stride, s.depth.dilation, s.depth.padding, z);
}
inline Taps seen_by_line(const Convolution& s, int64_t i) {
  return seen_along(s.in.h, s.kernel.h, s.stride.h, s.dilation.h, s.padding.h, i);
}

inline bool is_depthwise(const Convolution& s) {
  const bool flat = s.depth.in == 1 && s.depth.out == 1 && s.depth.kernel == 1 && s.depth.padding == 0;
  return s.groups == s.channels && s.channels == s.outputs && s.groups > 1 && flat;
}

inline float* floats(Workspace& workspace, int64_t count) {
  return static_cast<float*>(workspace.allocate(static_cast<size_t>(count + kSlack) * sizeof(float)));
}

// Columns cut into panels as wide as a tile can be; the last one has as many vectors as it needs.
struct Panels {
  explicit Panels(int64_t all) : columns(all), width(kMostVectors * loops().lanes), count(ceil_div(all, width)) {}
  int64_t vectors(int64_t panel) const { return std::min<int64_t>(kMostVectors, ceil_div(rest(panel), loops().lanes)); }
  int64_t width_of(int64_t panel) const { return vectors(panel) * loops().lanes; }
  int64_t rest(int64_t panel) const { return columns - panel * width; }

  int64_t columns, width, count;
};

struct InputPlanes {
  const float* data;
  const float* limit;  // the end of what may be read
  int64_t plane;
};

inline InputPlanes make_planes(const PlaneLayout& layout, const float* source, int64_t count, Parallel& parallel,
                               Workspace& workspace) {
  const int64_t plane = layout.size();
  if (layout.is_copy()) return {source, source + count * plane, plane};
  float* data = floats(workspace, count * plane);
  const int64_t pixels = layout.depths.source * layout.rows.source * layout.columns.source;
  const int64_t together = std::max<int64_t>(1, 16384 / plane);
  parallel_for(parallel, ceil_div(count, together), [&](int64_t task) {
    const int64_t end = std::min(count, (task + 1) * together);
    for (int64_t i = task * together; i < end; ++i) layout.fill(source + i * pixels, data + i * plane);
  });
  return {data, data + count * plane + kSlack, plane};
}

// c (rows, columns of a panel of `vectors` vectors) += a panel, as Loops::tile; the last tile may be a short one.
// row(r) is where row r < rows begins.
template <class Row>
void multiply(int64_t rows, int64_t vectors, const Walk& walk, const float* panel, float* c, const Row& row) {
  const Loops& loop = loops();
  for (int64_t first = 0; first < rows;) {
    const bool is_short = rows - first <= loop.short_rows;
    const int64_t count = is_short ? loop.short_rows : loop.rows;
    const float* at[kMostTileRows];
    for (int64_t r = 0; r < count; ++r) at[r] = row(std::min(first + r, rows - 1));
    (is_short ? loop.short_tile : loop.tile)[vectors](at, walk, panel, c + first * vectors * loop.lanes);
    first += count;
  }
}

// Rows of sums that `multiply` writes.
inline int64_t padded_rows(int64_t rows) { return ceil_div(rows, loops().short_rows) * loops().short_rows; }

}  // namespace bnexport::cpu
