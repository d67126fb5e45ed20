// Convolutions as matrix products whose operands are never written out as a whole.
//
// A tile multiplies a few rows, whose values are broadcast from where they lie, with a packed panel:
//
//                          rows, read in place    panel, packed (sum, columns)
//   y (O, N pixels)        w (O, C K)             what K taps of x see of a group of pixels
//   dx (C, N pixels)       w (C, O K)             what K taps of g see of a group of pixels
//   dw (C K, O)            x, shifted by a tap    g transposed; for 1x1 kernels also the other way round
//
// Panels are packed block by block of the sum and used while they are in the cache. Layers with one channel
// in each group have loops of their own (depthwise.cpp).
#include "convolution.h"

#include <algorithm>
#include <cstring>

#include "depthwise.h"
#include "loops.h"
#include "planes.h"

namespace bnexport::cpu {

namespace {

// Steps of a sum between packing and packing: 48 KB of panel.
constexpr int64_t kBlock = 256;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t taps(const Convolution& s) { return s.kernel.h * s.kernel.w; }
int64_t pixels(const Pair& extents) { return extents.h * extents.w; }
bool is_depthwise(const Convolution& s) { return s.groups == s.channels && s.channels == s.outputs && s.groups > 1; }

float* floats(Workspace& workspace, int64_t count) {
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

struct Planes {
  const float* data;
  const float* limit;  // the end of what may be read
  int64_t plane;
};

Planes make_planes(const PlaneLayout& layout, const float* source, int64_t count, Parallel& parallel,
                   Workspace& workspace) {
  const int64_t plane = layout.size();
  if (layout.is_copy()) return {source, source + count * plane, plane};
  float* data = floats(workspace, count * plane);
  const int64_t pixels = layout.rows.source * layout.columns.source;
  const int64_t together = std::max<int64_t>(1, 16384 / plane);
  parallel_for(parallel, ceil_div(count, together), [&](int64_t task) {
    const int64_t end = std::min(count, (task + 1) * together);
    for (int64_t i = task * together; i < end; ++i) layout.fill(source + i * pixels, data + i * plane);
  });
  return {data, data + count * plane + kSlack, plane};
}

// Rows times panels, for each group: result (rows, columns) = a (rows, steps * inner) times what the runs of
// columns show at offsets (steps * inner).
struct Product {
  int64_t groups, rows, steps, inner, columns;
  const float* a;
  int64_t a_group, a_row, a_pitch;  // from group to group, row to row, step to step
  Planes planes;
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
  block_steps_ = std::max<int64_t>(1, kBlock / inner);
  cut_runs(cut.width);
  // Few panels: rows are shared out, too, in pieces that are worth a panel's packing.
  const int64_t wanted = 2 * parallel.width();
  const int64_t cuts = std::max<int64_t>(1, std::min(ceil_div(wanted, groups * panels), rows / 64));
  const int64_t piece = ceil_div(ceil_div(rows, cuts), loop.rows) * loop.rows;
  const int64_t pieces = ceil_div(rows, piece), units = groups * panels * pieces;
  const int64_t tasks = std::min(units, 4 * parallel.width());
  const int64_t packed_size = block_steps_ * inner * cut.width + kSlack, sums_size = piece * cut.width;
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
  std::memset(sums, 0, static_cast<size_t>(ceil_div(last - first, loop.rows) * loop.rows * width) * sizeof(float));
  for (int64_t step = 0; step < steps; step += block_steps_) {
    const int64_t count = std::min(block_steps_, steps - step);
    loop.pack(planes.data + group * planes_group, offsets.data() + step * inner, count * inner, runs.data() + begin,
              static_cast<int64_t>(end - begin), width, planes.limit, packed);
    const Walk walk = a_pitch == inner ? Walk{count * inner, 1, 0, 1, 0} : Walk{inner, count, a_pitch, 1, 0};
    for (int64_t row = first; row < last; row += loop.rows) {
      const float* at[kMostRows];
      for (int64_t r = 0; r < loop.rows; ++r) {
        at[r] = a + group * a_group + std::min(row + r, last - 1) * a_row + step * a_pitch;
      }
      loop.tile[cut.vectors(panel)](at, walk, packed, sums + (row - first) * width);
    }
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
  const Planes planes = make_planes(layout, grad, s.batch * s.outputs, parallel, workspace);
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

void weight_gradient(const Convolution& s, const float* grad, const float* x, float* grad_weight, Parallel& parallel,
                     Workspace& workspace) {
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, own = taps(s), plane_out = pixels(s.out);
  if (s.outputs * ins * own == 0) return;
  if (s.batch == 0 || plane_out == 0) {
    std::memset(grad_weight, 0, static_cast<size_t>(s.outputs * ins * own) * sizeof(float));
    return;
  }
  std::vector<int64_t> offsets;
  const PlaneLayout layout = input_planes(s, &offsets);
  if (is_depthwise(s)) return depthwise_weight_gradient(s, layout, offsets, grad, x, grad_weight, parallel, workspace);
  const Loops& loop = loops();
  const Planes planes = make_planes(layout, x, s.batch * s.channels, parallel, workspace);
  // A 1x1 kernel's roles may change: what has fewer channels is cheaper to transpose.
  const bool turned = own == 1 && layout.is_copy() && outs > ins;
  const Planes rows_of = turned ? Planes{grad, nullptr, plane_out} : planes;
  const int64_t row_channels = turned ? outs : ins, lane_channels = turned ? ins : outs;
  const int64_t pitch = turned ? s.out.w : layout.columns.length, image = s.groups * row_channels * rows_of.plane;
  const float* lanes_of = turned ? x : grad;

  // The other operand transposed: (groups, panels, N, pixels, width).
  const Panels cut(lane_channels);
  const int64_t panels = cut.count, panel_size = s.batch * plane_out * cut.width;
  float* packed = floats(workspace, s.groups * panels * panel_size);
  parallel_for(parallel, s.groups * panels * s.batch, [&](int64_t task) {
    const int64_t n = task % s.batch, panel = task / s.batch % panels, group = task / s.batch / panels;
    const int64_t first = (n * s.groups + group) * lane_channels + panel * cut.width, width = cut.width_of(panel);
    loop.transpose(lanes_of + first * plane_out, plane_out, std::min(width, cut.rest(panel)), plane_out, width,
                   packed + (group * panels + panel) * panel_size + n * plane_out * width);
  });

  // Blocks of the sum: some images, or some lines of one.
  const int64_t images = std::max<int64_t>(1, std::min(s.batch, 2 * kBlock / plane_out));
  const int64_t lines = std::max<int64_t>(1, std::min(s.out.h, 2 * kBlock / s.out.w));
  // Tasks: a panel, and some channels of the rows: enough tasks for all threads, and whole tiles.
  int64_t together = std::max<int64_t>(1, row_channels * s.groups * panels / (3 * parallel.width()));
  together = ceil_div(together * own, loop.rows) * loop.rows / own;
  together = std::max<int64_t>(1, std::min({together, ceil_div(512, own), row_channels}));
  const int64_t pieces = ceil_div(row_channels, together), units = s.groups * pieces * panels;
  const int64_t tasks = std::min(units, 4 * parallel.width());
  const int64_t sums_size = ceil_div(together * own, loop.rows) * loop.rows * cut.width;
  float* scratch = floats(workspace, tasks * sums_size);

  const auto unit_of_work = [&](int64_t unit, float* sums) {
    const int64_t panel = unit % panels, piece = unit / panels % pieces, group = unit / panels / pieces;
    const int64_t first = piece * together, rows = std::min(together, row_channels - first) * own;
    const float* data = rows_of.data + (group * row_channels + first) * rows_of.plane;
    const float* block = packed + (group * panels + panel) * panel_size;
    const int64_t width = cut.width_of(panel), lanes = std::min(width, cut.rest(panel));
    std::memset(sums, 0, static_cast<size_t>(sums_size) * sizeof(float));
    for (int64_t n = 0; n < s.batch; n += images) {
      const int64_t many = std::min(images, s.batch - n);
      const int64_t height = images > 1 ? s.out.h : lines;
      for (int64_t line = 0; line < s.out.h; line += height) {
        const int64_t lower = std::min(height, s.out.h - line);
        const Walk walk =
            pitch == s.out.w ? Walk{lower * s.out.w, 1, 0, many, image} : Walk{s.out.w, lower, pitch, many, image};
        for (int64_t row = 0; row < rows; row += loop.rows) {
          const float* at[kMostRows];
          for (int64_t r = 0; r < loop.rows; ++r) {
            const int64_t each = std::min(row + r, rows - 1);
            at[r] =
                data + n * image + each / own * rows_of.plane + offsets[static_cast<size_t>(each % own)] + line * pitch;
          }
          loop.tile[cut.vectors(panel)](at, walk, block + (n * plane_out + line * s.out.w) * width, sums + row * width);
        }
      }
    }
    if (turned) {
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(grad_weight + (group * outs + first + row) * ins + panel * cut.width, sums + row * width,
                    static_cast<size_t>(lanes) * sizeof(float));
      }
      return;
    }
    for (int64_t o = 0; o < lanes; ++o) {
      float* to = grad_weight + ((group * outs + panel * cut.width + o) * ins + first) * own;
      for (int64_t row = 0; row < rows; ++row) to[row] = sums[row * width + o];
    }
  };
  parallel_for(parallel, tasks, [&](int64_t task) {
    for (int64_t unit = task * units / tasks; unit < (task + 1) * units / tasks; ++unit) {
      unit_of_work(unit, scratch + task * sums_size);
    }
  });
}

}  // namespace bnexport::cpu
