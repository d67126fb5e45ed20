#include "planes.h"

#include <algorithm>
#include <cstring>

#include "../../../common/math.h"

namespace bnexport::cpu {

namespace {

void fill_row(const Axis& axis, int64_t phase, const float* source, float* row) {
  // source[stride * i + shift] for i in [first, end).
  const int64_t shift = phase - axis.before;
  const int64_t first = std::clamp<int64_t>(ceil_div(-shift, axis.stride), 0, axis.length);
  const int64_t end = std::clamp<int64_t>(ceil_div(axis.source - shift, axis.stride), first, axis.length);
  for (int64_t i = 0; i < first; ++i) row[i] = 0;
  if (axis.stride == 1) {
    for (int64_t i = first; i < end; ++i) row[i] = source[i + shift];
  } else if (axis.stride == 2) {
    for (int64_t i = first; i < end; ++i) row[i] = source[2 * i + shift];
  } else {
    for (int64_t i = first; i < end; ++i) row[i] = source[axis.stride * i + shift];
  }
  for (int64_t i = end; i < axis.length; ++i) row[i] = 0;
}

Axis input_axis(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t dilation, int64_t padding,
                std::vector<int64_t>* phase_of_tap) {
  Axis axis{in, padding, stride, out + dilation * (kernel - 1) / stride, {}};
  for (int64_t k = 0; k < kernel; ++k) {
    const int64_t phase = dilation * k % stride;
    const auto found = std::find(axis.phases.begin(), axis.phases.end(), phase);
    phase_of_tap->push_back(found - axis.phases.begin());
    if (found == axis.phases.end()) axis.phases.push_back(phase);
  }
  return axis;
}

// The phase r of a dimension of the gradient by the input.
struct AxisPhase {
  int64_t first, count, base;
  std::vector<int64_t> taps, shifts;
};

Axis gradient_axis(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t dilation, int64_t padding,
                   std::vector<AxisPhase>* phases) {
  // Input y with y + p = s q + r sees output q - shift of each tap, shift = d k for s = 1, and u for the
  // tap r + s u otherwise.
  const int64_t farthest = stride == 1 ? dilation * (kernel - 1) : (kernel - 1) / stride;
  const int64_t lowest = padding / stride, highest = (in - 1 + padding) / stride;
  for (int64_t r = 0; r < stride; ++r) {
    AxisPhase phase;
    const int64_t q = ceil_div(padding - r, stride);
    phase.first = stride * q + r - padding;
    phase.count = phase.first < in ? (in - 1 - phase.first) / stride + 1 : 0;
    phase.base = q - lowest;
    for (int64_t k = r; k < kernel; k += stride) {
      phase.taps.push_back(k);
      phase.shifts.push_back(farthest - (stride == 1 ? dilation * k : k / stride));
    }
    phases->push_back(std::move(phase));
  }
  return {out, farthest - lowest, 1, highest - lowest + 1 + farthest, {0}};
}

}  // namespace

bool PlaneLayout::is_copy() const {
  const auto same = [](const Axis& a) { return a.stride == 1 && a.before == 0 && a.length == a.source; };
  return same(rows) && same(columns) && same(depths);
}

void PlaneLayout::fill(const float* source, float* plane) const {
  for (int64_t i = 0; i < depths.length; ++i, plane += slice()) {
    const int64_t z = i - depths.before;
    if (z >= 0 && z < depths.source) {
      fill_slice(source + z * rows.source * columns.source, plane);
    } else {
      std::memset(plane, 0, static_cast<size_t>(slice()) * sizeof(float));
    }
  }
}

void PlaneLayout::fill_slice(const float* source, float* plane) const {
  for (const int64_t row_phase : rows.phases) {
    for (const int64_t column_phase : columns.phases) {
      for (int64_t i = 0; i < rows.length; ++i) {
        const int64_t y = rows.stride * i + row_phase - rows.before;
        if (y >= 0 && y < rows.source) {
          fill_row(columns, column_phase, source + y * columns.source, plane);
        } else {
          std::memset(plane, 0, static_cast<size_t>(columns.length) * sizeof(float));
        }
        plane += columns.length;
      }
    }
  }
}

PlaneLayout input_planes(const Convolution& s, std::vector<int64_t>* offsets) {
  std::vector<int64_t> row_phase, column_phase;
  PlaneLayout layout{input_axis(s.in.h, s.out.h, s.kernel.h, s.stride.h, s.dilation.h, s.padding.h, &row_phase),
                     input_axis(s.in.w, s.out.w, s.kernel.w, s.stride.w, s.dilation.w, s.padding.w, &column_phase),
                     {s.depth.in,
                      s.depth.padding,
                      1,
                      (s.depth.out - 1) * s.depth.stride + s.depth.dilation * (s.depth.kernel - 1) + 1,
                      {0}}};
  const auto columns = static_cast<int64_t>(layout.columns.phases.size());
  for (int64_t z = 0; z < s.depth.kernel; ++z) {
    for (int64_t y = 0; y < s.kernel.h; ++y) {
      for (int64_t x = 0; x < s.kernel.w; ++x) {
        const int64_t phase = row_phase[static_cast<size_t>(y)] * columns + column_phase[static_cast<size_t>(x)];
        offsets->push_back(z * s.depth.dilation * layout.slice() + phase * layout.phase_size() +
                           s.dilation.h * y / s.stride.h * layout.columns.length + s.dilation.w * x / s.stride.w);
      }
    }
  }
  return layout;
}

PlaneLayout gradient_planes(const Convolution& s, std::vector<GradientPhase>* phases) {
  std::vector<AxisPhase> slice_phases, row_phases, column_phases;
  PlaneLayout layout{gradient_axis(s.in.h, s.out.h, s.kernel.h, s.stride.h, s.dilation.h, s.padding.h, &row_phases),
                     gradient_axis(s.in.w, s.out.w, s.kernel.w, s.stride.w, s.dilation.w, s.padding.w, &column_phases),
                     gradient_axis(s.depth.in, s.depth.out, s.depth.kernel, s.depth.stride, s.depth.dilation,
                                   s.depth.padding, &slice_phases)};
  const auto make = [&](const AxisPhase& z, const AxisPhase& y, const AxisPhase& x) {
    GradientPhase phase{{y.first, x.first}, {y.count, x.count}, {y.base, x.base}, z.first, z.count, z.base, {}, {}};
    for (size_t h = 0; h < z.taps.size(); ++h) {
      for (size_t i = 0; i < y.taps.size(); ++i) {
        for (size_t j = 0; j < x.taps.size(); ++j) {
          phase.taps.push_back((z.taps[h] * s.kernel.h + y.taps[i]) * s.kernel.w + x.taps[j]);
          phase.offsets.push_back(z.shifts[h] * layout.slice() + y.shifts[i] * layout.columns.length + x.shifts[j]);
        }
      }
    }
    return phase;
  };
  for (const AxisPhase& z : slice_phases) {
    for (const AxisPhase& y : row_phases) {
      for (const AxisPhase& x : column_phases) phases->push_back(make(z, y, x));
    }
  }
  return layout;
}

}  // namespace bnexport::cpu
