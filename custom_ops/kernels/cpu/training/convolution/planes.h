// A channel's plane as the loops want it: padded, and cut into phases when there is a stride, so that what
// a tap of the kernel sees of a row of the output is a run of neighbours, at a constant offset.
#pragma once

#include <cstdint>
#include <vector>

#include "convolution.h"

namespace bnexport::cpu {

// One dimension. Position i of phase f holds source[stride * i + phases[f] - before], or zero.
struct Axis {
  int64_t source, before, stride, length;
  std::vector<int64_t> phases;
};

struct PlaneLayout {
  Axis rows, columns;
  Axis depths;  // of slices of rows and columns; without phases

  int64_t phase_size() const { return rows.length * columns.length; }
  int64_t slice() const {
    return phase_size() * static_cast<int64_t>(rows.phases.size()) * static_cast<int64_t>(columns.phases.size());
  }
  int64_t size() const { return depths.length * slice(); }
  // Whether the planes are the source as it is.
  bool is_copy() const;
  void fill(const float* source, float* plane) const;

 private:
  void fill_slice(const float* source, float* plane) const;
};

// For the values of x that outputs see, and offsets of the taps in row-major order.
PlaneLayout input_planes(const Convolution& shape, std::vector<int64_t>* offsets);

// The inputs with s q + r - p for their index, for one r of each dimension: the taps that reach them and
// where; planes of the gradient serve all phases alike.
struct GradientPhase {
  Pair first;                               // smallest index of the phase in the input
  Pair count;                               // how many there are
  Pair base;                                // where in the plane the window of the first one begins
  int64_t first_slice, slices, base_slice;  // the same of the depth
  std::vector<int64_t> taps;                // kernel positions, row-major
  std::vector<int64_t> offsets;             // of each of them
};
PlaneLayout gradient_planes(const Convolution& shape, std::vector<GradientPhase>* phases);

}  // namespace bnexport::cpu
