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
  std::vector<Run> runs;   // in the order of columns
  std::vector<Taps> live;  // of each run
  float* result;
  int64_t result_group, result_row, result_step;
  const float* bias = nullptr;  // (groups * rows,)

  // The next columns, of which the taps outside `seen` see zeros.
  void add(Run run, Taps seen) {
    run.column = runs.empty() ? 0 : runs.back().column + runs.back().length;
    runs.push_back(run);
    live.push_back(seen);
  }
  void compute(Parallel& parallel, Workspace& workspace);

 private:
  // Taps that see a value of a panel, and their offsets in all steps.
  struct Seen {
    Taps taps;
    std::vector<int64_t> offsets;
  };

  void cut_runs(int64_t width);
  size_t offsets_of(const Taps& taps);
  void block(int64_t group, int64_t panel, int64_t first, int64_t last, float* packed, float* sums) const;
  void write(int64_t group, int64_t panel, int64_t first, int64_t last, const float* sums) const;

  int64_t block_steps_ = 0;
  std::vector<size_t> panel_runs_;  // where each panel's runs begin, and the end
  std::vector<Seen> seen_;
  std::vector<size_t> panel_seen_;  // what any of a panel's runs sees
};

// Cuts runs at the ends of panels, and counts their columns from the panel's first.
void Product::cut_runs(int64_t width) {
  std::vector<Run> cut;
  std::vector<Taps> taps;  // of each panel
  int64_t end = 0;
  for (size_t r = 0; r < runs.size(); ++r) {
    Run run = runs[r];
    while (run.length > 0) {
      if (run.column == end) {
        panel_runs_.push_back(cut.size());
        taps.push_back(live[r]);
        end += width;
      }
      taps.back() = join(taps.back(), live[r]);
      const int64_t length = std::min(run.length, end - run.column);
      cut.push_back({run.column - (end - width), length, run.source, run.target});
      run = {run.column + length, run.length - length, run.source + length, run.target + length * result_step};
    }
  }
  panel_runs_.push_back(cut.size());
  runs = std::move(cut);
  for (const Taps& own : taps) panel_seen_.push_back(offsets_of(own));
}

// The place in seen_ of the offsets of these taps: there are few ranges.
size_t Product::offsets_of(const Taps& taps) {
  const auto same = [&](const Seen& each) { return each.taps == taps; };
  const auto found = std::find_if(seen_.begin(), seen_.end(), same);
  const auto place = static_cast<size_t>(found - seen_.begin());
  if (found != seen_.end()) return place;
  Seen made{taps, {}};
  for (int64_t step = 0; step < steps; ++step) {
    const auto first = offsets.begin() + step * inner;
    made.offsets.insert(made.offsets.end(), first + taps.first, first + taps.last);
  }
  seen_.push_back(std::move(made));
  return place;
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
  const Seen& part = seen_[panel_seen_[static_cast<size_t>(panel)]];
  const int64_t own = part.taps.last - part.taps.first;
  for (int64_t step = 0; step < steps && own > 0; step += block_steps_) {
    const int64_t count = std::min(block_steps_, steps - step);
    const int64_t* seen = part.offsets.data() + step * own;
    loop.pack(planes.data + group * planes_group, seen, count * own, runs.data() + begin,
              static_cast<int64_t>(end - begin), width, planes.limit, packed);
    const Walk walk = a_pitch == own ? Walk{count * own, 1, 0, 1, 0, 0} : Walk{own, count, a_pitch, 1, 0, 0};
    const float* from = a + group * a_group + first * a_row + step * a_pitch + part.taps.first;
    multiply(last - first, cut.vectors(panel), walk, packed, sums, [&](int64_t row) { return from + row * a_row; });
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

// Images, slices and lines in the order of columns: where a panel holds several lines, those together that see the same
// taps.
template <class Body>
void each_line(const Convolution& s, int64_t slices, const Pair& extents, const Body& body) {
  const bool together = extents.w < kMostVectors * loops().lanes, by_height = together && s.depth.kernel == 1;
  const int64_t lines = slices * extents.h;
  for (int64_t k = 0; k < s.batch * lines; ++k) {
    const int64_t n = together ? k % s.batch : k / lines, line = together ? k / s.batch : k % lines;
    by_height ? body(n, line % slices, line / slices) : body(n, line / extents.h, line % extents.h);
  }
}

// The first to the last tap, row-major, that see a value of x from a line of y.
Taps seen_by(const Convolution& s, int64_t slice, int64_t line) {
  const Taps z = seen_by_slice(s, slice), y = seen_by_line(s, line);
  if (z.empty() || y.empty()) return {0, 0};
  return {(z.first * s.kernel.h + y.first) * s.kernel.w, ((z.last - 1) * s.kernel.h + y.last) * s.kernel.w};
}

// The first to the last tap of a phase that see a value of the gradient from one of its lines.
Taps seen_by(const PlaneLayout& layout, const GradientPhase& phase, int64_t slice, int64_t line) {
  const auto sees = [&](int64_t offset) {
    const int64_t z = phase.base_slice + slice + offset / layout.slice() - layout.depths.before;
    const int64_t y = phase.base.h + line + offset % layout.slice() / layout.columns.length - layout.rows.before;
    return z >= 0 && z < layout.depths.source && y >= 0 && y < layout.rows.source;
  };
  Taps seen{0, 0};
  for (size_t t = 0; t < phase.offsets.size(); ++t) {
    if (!sees(phase.offsets[t])) continue;
    const auto tap = static_cast<int64_t>(t);
    seen = {seen.empty() ? tap : seen.first, tap + 1};
  }
  return seen;
}

}  // namespace

bool has_input_gradient(const Convolution& s) {
  return (s.stride.h == 1 || s.dilation.h == 1) && (s.stride.w == 1 || s.dilation.w == 1) &&
         (s.depth.stride == 1 || s.depth.dilation == 1);
}

void convolve(const Convolution& s, const float* x, const float* weight, const float* bias, float* y,
              Parallel& parallel, Workspace& workspace) {
  if (s.batch == 0 || s.outputs == 0 || pixels_out(s) == 0) return;
  std::vector<int64_t> offsets;
  const PlaneLayout layout = input_planes(s, &offsets);
  if (is_depthwise(s)) return depthwise_convolve(s, layout, offsets, x, weight, bias, y, parallel, workspace);
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, plane_out = pixels_out(s);
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
  const auto run = [&](int64_t n, int64_t z, int64_t i, int64_t length, Taps seen) {
    const int64_t source = (n * s.channels * layout.depths.length + z * s.depth.stride) * layout.slice();
    const int64_t target = (n * s.outputs * s.depth.out + z) * pixels(s.out) + i * s.out.w;
    p.add({0, length, source + i * layout.columns.length, target}, seen);
  };
  if (layout.columns.length == s.out.w) {
    for (int64_t k = 0; k < s.batch * s.depth.out; ++k) {
      run(k / s.depth.out, k % s.depth.out, 0, pixels(s.out), {0, p.inner});
    }
  } else {
    each_line(s, s.depth.out, s.out, [&](int64_t n, int64_t z, int64_t i) { run(n, z, i, s.out.w, seen_by(s, z, i)); });
  }
  p.compute(parallel, workspace);
}

void input_gradient(const Convolution& s, const float* grad, const float* weight, float* grad_input, Parallel& parallel,
                    Workspace& workspace) {
  if (s.batch == 0 || s.channels == 0 || pixels_in(s) == 0) return;
  std::vector<GradientPhase> phases;
  const PlaneLayout layout = gradient_planes(s, &phases);
  if (is_depthwise(s))
    return depthwise_input_gradient(s, layout, phases, grad, weight, grad_input, parallel, workspace);
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, plane_in = pixels_in(s), all = taps(s);
  const InputPlanes planes = make_planes(layout, grad, s.batch * s.outputs, parallel, workspace);
  const bool skips = std::any_of(phases.begin(), phases.end(), [](const GradientPhase& f) { return f.taps.empty(); });
  if (skips) std::memset(grad_input, 0, static_cast<size_t>(s.batch * s.channels * plane_in) * sizeof(float));
  for (const GradientPhase& phase : phases) {
    const auto own = static_cast<int64_t>(phase.taps.size());
    if (own == 0 || phase.slices * pixels(phase.count) == 0) continue;
    Product p{};
    p.groups = s.groups;
    p.rows = ins;
    p.steps = outs;
    p.inner = own;
    p.columns = s.batch * phase.slices * pixels(phase.count);
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
    each_line(s, phase.slices, phase.count, [&](int64_t n, int64_t z, int64_t i) {
      const int64_t source = (n * s.outputs * layout.depths.length + phase.base_slice + z) * layout.slice() +
                             (phase.base.h + i) * layout.columns.length + phase.base.w;
      const int64_t target = n * s.channels * plane_in + (phase.first_slice + z * s.depth.stride) * pixels(s.in) +
                             (phase.first.h + i * s.stride.h) * s.in.w + phase.first.w;
      p.add({0, phase.count.w, source, target}, seen_by(layout, phase, z, i));
    });
    p.compute(parallel, workspace);
  }
}

}  // namespace bnexport::cpu
