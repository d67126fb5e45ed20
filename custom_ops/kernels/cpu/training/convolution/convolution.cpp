// Convolutions as matrix products whose operands are never written out as a whole.
//
// A tile multiplies a few rows, whose values are broadcast from where they lie, with a packed panel:
//
//                          rows, read in place    panel, packed (sum, columns)
//   y (O, N pixels)        w (O, C K)             what K taps of x see of a group of pixels
//   dx (C, N pixels)       w (C, O K)             what K taps of g see of a group of pixels
//   dw (C K, O)            weight_gradient.cpp
//
// Panels are packed block by block of the sum and used while they are in the cache. Layers with one channel
// in each group have loops of their own (depthwise.cpp).
#include "convolution.h"

#include <algorithm>
#include <cstring>

#include "depthwise.h"
#include "panels.h"

namespace bnexport::cpu {

namespace {

// Rows times panels, for each group: result (rows, columns) = a (rows, steps * inner) times what the runs of
// columns show at offsets (steps * inner).
struct Product {
  int64_t groups, rows, steps, inner, columns;
  const float* a;
  int64_t a_group, a_row, a_pitch;  // from group to group, row to row, step to step
  InputPlanes planes;
  int64_t planes_group;
  std::vector<int64_t> offsets;
  std::vector<Run> runs;  // in the order of columns
  float* result;
  int64_t result_group, result_row, result_step;
  const float* bias = nullptr;  // (groups * rows,)

  void compute(Parallel& parallel, Workspace& workspace);

 private:
  void cut_runs(int64_t width);
  void block(int64_t group, int64_t panel, int64_t first, int64_t last, float* packed, float* sums) const;
  void write(int64_t group, int64_t panel, int64_t first, int64_t last, const float* sums) const;

  int64_t block_steps_ = 0;
  std::vector<size_t> panel_runs_;  // where each panel's runs begin, and the end
};

// Cuts runs at the ends of panels, and counts their columns from the panel's first.
void Product::cut_runs(int64_t width) {
  std::vector<Run> cut;
  panel_runs_.push_back(0);
  int64_t end = width;
  for (Run run : runs) {
    while (run.length > 0) {
      if (run.column == end) {
        panel_runs_.push_back(cut.size());
        end += width;
      }
      const int64_t length = std::min(run.length, end - run.column);
      cut.push_back({run.column - (end - width), length, run.source, run.target});
      run = {run.column + length, run.length - length, run.source + length, run.target + length * result_step};
    }
  }
  panel_runs_.push_back(cut.size());
  runs = std::move(cut);
}

void Product::compute(Parallel& parallel, Workspace& workspace) {
  const Loops& loop = loops();
  const Panels cut(columns);
  const int64_t panels = cut.count;
  block_steps_ = std::max<int64_t>(1, kPanelSteps / inner);
  cut_runs(cut.width);
  // Few panels: rows are shared out, too, in pieces that are worth a panel's packing.
  const int64_t wanted = 2 * parallel.width();
  const int64_t cuts = std::max<int64_t>(1, std::min(ceil_div(wanted, groups * panels), rows / 64));
  const int64_t piece = ceil_div(ceil_div(rows, cuts), loop.rows) * loop.rows;
  const int64_t pieces = ceil_div(rows, piece), units = groups * panels * pieces;
  const int64_t tasks = std::min(units, 4 * parallel.width());
  const int64_t width = cut.width_of(0), packed_size = block_steps_ * inner * width + kSlack, sums_size = piece * width;
  float* scratch = floats(workspace, tasks * (packed_size + sums_size));
  parallel_for(parallel, tasks, [&](int64_t task) {
    float* packed = scratch + task * (packed_size + sums_size);
    for (int64_t unit = task * units / tasks; unit < (task + 1) * units / tasks; ++unit) {
      const int64_t first = unit % pieces * piece;
      block(unit / pieces / panels, unit / pieces % panels, first, std::min(rows, first + piece), packed,
            packed + packed_size);
    }
  });
}

void Product::block(int64_t group, int64_t panel, int64_t first, int64_t last, float* packed, float* sums) const {
  const Loops& loop = loops();
  const Panels cut(columns);
  const int64_t width = cut.width_of(panel);
  const size_t begin = panel_runs_[static_cast<size_t>(panel)], end = panel_runs_[static_cast<size_t>(panel) + 1];
  std::memset(sums, 0, static_cast<size_t>(padded_rows(last - first) * width) * sizeof(float));
  for (int64_t step = 0; step < steps; step += block_steps_) {
    const int64_t count = std::min(block_steps_, steps - step);
    loop.pack(planes.data + group * planes_group, offsets.data() + step * inner, count * inner, runs.data() + begin,
              static_cast<int64_t>(end - begin), width, planes.limit, packed);
    const Walk walk = a_pitch == inner ? Walk{count * inner, 1, 0, 1, 0} : Walk{inner, count, a_pitch, 1, 0};
    multiply(last - first, cut.vectors(panel), walk, packed, sums,
             [&](int64_t row) { return a + group * a_group + (first + row) * a_row + step * a_pitch; });
  }
  write(group, panel, first, last, sums);
}

void Product::write(int64_t group, int64_t panel, int64_t first, int64_t last, const float* sums) const {
  const int64_t width = Panels(columns).width_of(panel);
  for (int64_t row = first; row < last; ++row, sums += width) {
    float* to = result + group * result_group + row * result_row;
    const float start = bias == nullptr ? 0.0f : bias[group * rows + row];
    for (size_t r = panel_runs_[static_cast<size_t>(panel)]; r < panel_runs_[static_cast<size_t>(panel) + 1]; ++r) {
      const Run& run = runs[r];
      const float* from = sums + run.column;
      float* at = to + run.target;
      if (result_step == 1 && bias == nullptr) {
        std::memcpy(at, from, static_cast<size_t>(run.length) * sizeof(float));
      } else {
        for (int64_t i = 0; i < run.length; ++i) at[i * result_step] = from[i] + start;
      }
    }
  }
}

// (count, taps) offsets: those of the taps in each of `count` planes.
std::vector<int64_t> in_planes(int64_t count, int64_t plane, const std::vector<int64_t>& offsets) {
  std::vector<int64_t> all;
  all.reserve(static_cast<size_t>(count) * offsets.size());
  for (int64_t c = 0; c < count; ++c) {
    for (const int64_t offset : offsets) all.push_back(c * plane + offset);
  }
  return all;
}

}  // namespace

bool has_input_gradient(const Convolution& s) {
  return (s.stride.h == 1 || s.dilation.h == 1) && (s.stride.w == 1 || s.dilation.w == 1);
}

void convolve(const Convolution& s, const float* x, const float* weight, const float* bias, float* y,
              Parallel& parallel, Workspace& workspace) {
  if (s.batch == 0 || s.outputs == 0 || pixels(s.out) == 0) return;
  std::vector<int64_t> offsets;
  const PlaneLayout layout = input_planes(s, &offsets);
  if (is_depthwise(s)) return depthwise_convolve(s, layout, offsets, x, weight, bias, y, parallel, workspace);
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, plane_out = pixels(s.out);
  Product p{};
  p.groups = s.groups;
  p.rows = outs;
  p.steps = ins;
  p.inner = taps(s);
  p.columns = s.batch * plane_out;
  p.a = weight;
  p.a_row = ins * p.inner;
  p.a_group = outs * p.a_row;
  p.a_pitch = p.inner;
  p.planes = make_planes(layout, x, s.batch * s.channels, parallel, workspace);
  p.planes_group = ins * p.planes.plane;
  p.offsets = in_planes(ins, p.planes.plane, offsets);
  p.result = y;
  p.result_row = plane_out;
  p.result_group = outs * plane_out;
  p.result_step = 1;
  p.bias = bias;
  for (int64_t n = 0; n < s.batch; ++n) {
    const int64_t source = n * s.channels * p.planes.plane, target = n * s.outputs * plane_out;
    if (layout.columns.length == s.out.w) {
      p.runs.push_back({n * plane_out, plane_out, source, target});
      continue;
    }
    for (int64_t i = 0; i < s.out.h; ++i) {
      p.runs.push_back(
          {n * plane_out + i * s.out.w, s.out.w, source + i * layout.columns.length, target + i * s.out.w});
    }
  }
  p.compute(parallel, workspace);
}

void input_gradient(const Convolution& s, const float* grad, const float* weight, float* grad_input, Parallel& parallel,
                    Workspace& workspace) {
  if (s.batch == 0 || s.channels == 0 || pixels(s.in) == 0) return;
  std::vector<GradientPhase> phases;
  const PlaneLayout layout = gradient_planes(s, &phases);
  if (is_depthwise(s))
    return depthwise_input_gradient(s, layout, phases, grad, weight, grad_input, parallel, workspace);
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, plane_in = pixels(s.in), all = taps(s);
  const InputPlanes planes = make_planes(layout, grad, s.batch * s.outputs, parallel, workspace);
  const bool skips = std::any_of(phases.begin(), phases.end(), [](const GradientPhase& f) { return f.taps.empty(); });
  if (skips) std::memset(grad_input, 0, static_cast<size_t>(s.batch * s.channels * plane_in) * sizeof(float));
  for (const GradientPhase& phase : phases) {
    const auto own = static_cast<int64_t>(phase.taps.size());
    if (own == 0 || pixels(phase.count) == 0) continue;
    Product p{};
    p.groups = s.groups;
    p.rows = ins;
    p.steps = outs;
    p.inner = own;
    p.columns = s.batch * pixels(phase.count);
    p.a = weight;
    if (own < all) {
      float* chosen = floats(workspace, s.outputs * ins * own);
      for (int64_t i = 0; i < s.outputs * ins; ++i) {
        for (int64_t t = 0; t < own; ++t) chosen[i * own + t] = weight[i * all + phase.taps[static_cast<size_t>(t)]];
      }
      p.a = chosen;
    }
    p.a_row = own;
    p.a_pitch = ins * own;
    p.a_group = outs * p.a_pitch;
    p.planes = planes;
    p.planes_group = outs * planes.plane;
    p.offsets = in_planes(outs, planes.plane, phase.offsets);
    p.result = grad_input;
    p.result_row = plane_in;
    p.result_group = ins * plane_in;
    p.result_step = s.stride.w;
    for (int64_t n = 0; n < s.batch; ++n) {
      for (int64_t i = 0; i < phase.count.h; ++i) {
        const int64_t source = n * s.outputs * planes.plane + (phase.base.h + i) * layout.columns.length + phase.base.w;
        const int64_t target = n * s.channels * plane_in + (phase.first.h + i * s.stride.h) * s.in.w + phase.first.w;
        p.runs.push_back({(n * phase.count.h + i) * phase.count.w, phase.count.w, source, target});
      }
    }
    p.compute(parallel, workspace);
  }
}

}  // namespace bnexport::cpu
