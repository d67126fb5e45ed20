// The gradient of a convolution by its weight as matrix products (panels.h):
//
//                          rows, read in place    panel, packed (pixels, columns)
//   dw (C K, O)            x, shifted by a tap    g transposed; for 1x1 kernels also the other way round
//   dw (O, C K)            g                      what each tap sees of x; where O is less than a vector
//
// In the first form the panels of a whole layer are packed once, and each serves all rows; in the second, panels are
// packed block by block, since each is used by few rows.
#include <cstring>

#include "depthwise.h"
#include "panels.h"

namespace bnexport::cpu {

namespace {

// Blocks of the sum: some planes, or some lines of one. Planes that follow each other in memory are the images, or the
// slices of each image.
struct PixelBlocks {
  explicit PixelBlocks(const Convolution& s)
      : total(s.depth.out > 1 ? s.depth.out : s.batch),
        planes(std::max<int64_t>(1, std::min(total, 2 * kPanelSteps / pixels(s.out)))),
        lines(planes > 1 ? s.out.h : std::max<int64_t>(1, std::min(s.out.h, 2 * kPanelSteps / s.out.w))) {}
  int64_t total, planes, lines;
};

// In planes of few pixels the loops of more groups cost what their sums save.
constexpr int64_t kFewPixels = 64;

// Neighbouring taps whose sums run over the same slices and lines of y: the others see zeros.
struct TapGroup {
  Taps taps, slices, lines;
};

// The positions of y, of `out`, from which tap k of a dimension sees a value of x.
template <class Seen>
Taps seeing(int64_t k, int64_t out, const Seen& seen) {
  Taps found{0, 0};
  for (int64_t i = 0; i < out; ++i) {
    const Taps taps = seen(i);
    if (taps.first <= k && k < taps.last) found = {found.empty() ? i : found.first, i + 1};
  }
  return found;
}

std::vector<TapGroup> group_taps(const Convolution& s) {
  std::vector<TapGroup> groups;
  for (int64_t k = 0; k < s.depth.kernel * s.kernel.h; ++k) {
    TapGroup own{{k * s.kernel.w, (k + 1) * s.kernel.w},
                 seeing(k / s.kernel.h, s.depth.out, [&](int64_t z) { return seen_by_slice(s, z); }),
                 {0, s.out.h}};
    if (pixels(s.out) * s.depth.out >= kFewPixels) {
      own.lines = seeing(k % s.kernel.h, s.out.h, [&](int64_t i) { return seen_by_line(s, i); });
    }
    if (!groups.empty() && groups.back().slices == own.slices && groups.back().lines == own.lines) {
      groups.back().taps.last = own.taps.last;
    } else {
      groups.push_back(own);
    }
  }
  return groups;
}

// Runs body(unit, scratch) for each unit, with `size` floats of scratch memory.
template <class Body>
void each_unit(int64_t units, int64_t size, Parallel& parallel, Workspace& workspace, const Body& body) {
  const int64_t tasks = std::min(units, 4 * parallel.width());
  float* scratch = floats(workspace, tasks * size);
  parallel_for(parallel, tasks, [&](int64_t task) {
    for (int64_t unit = task * units / tasks; unit < (task + 1) * units / tasks; ++unit) {
      body(unit, scratch + task * size);
    }
  });
}

void transposed_gradient(const Convolution& s, const PlaneLayout& layout, const std::vector<int64_t>& offsets,
                         const InputPlanes& planes, const float* grad, const float* x, float* grad_weight,
                         Parallel& parallel, Workspace& workspace) {
  const Loops& loop = loops();
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, own = taps(s), plane_out = pixels_out(s);
  // A 1x1 kernel's roles may change: what has fewer channels is cheaper to transpose.
  // A stride in depth leaves the planes as they are, but y then has fewer slices.
  const bool turned = own == 1 && layout.is_copy() && layout.size() == plane_out && outs > ins;
  const InputPlanes rows_of = turned ? InputPlanes{grad, nullptr, plane_out} : planes;
  const int64_t row_channels = turned ? outs : ins, lane_channels = turned ? ins : outs;
  const int64_t pitch = turned ? s.out.w : layout.columns.length, image = s.groups * row_channels * rows_of.plane;
  const float* lanes_of = turned ? x : grad;

  // The other operand transposed: (groups, panels, N, pixels, width of the panel).
  const Panels cut(lane_channels);
  const int64_t panels = cut.count, all_pixels = s.batch * plane_out;
  const int64_t group_size = all_pixels * ((panels - 1) * cut.width + cut.width_of(panels - 1));
  float* packed = floats(workspace, s.groups * group_size);
  std::vector<int64_t> channel_offsets(static_cast<size_t>(lane_channels));
  for (int64_t c = 0; c < lane_channels; ++c) channel_offsets[static_cast<size_t>(c)] = c * plane_out;
  parallel_for(parallel, s.groups * panels * s.batch, [&](int64_t task) {
    const int64_t n = task % s.batch, panel = task / s.batch % panels, group = task / s.batch / panels;
    const int64_t width = cut.width_of(panel);
    loop.transpose(lanes_of + (n * s.groups + group) * lane_channels * plane_out,
                   channel_offsets.data() + panel * cut.width, std::min(width, cut.rest(panel)), plane_out, width,
                   packed + group * group_size + panel * all_pixels * cut.width + n * plane_out * width);
  });

  const int64_t row_slice = turned ? pixels(s.out) : s.depth.stride * layout.slice();
  const PixelBlocks blocks(s);
  const bool by_slice = s.depth.out > 1;
  const int64_t jump = by_slice ? row_slice : image, plane = pixels(s.out);
  // Units: a panel, and some channels of the rows: enough of them for all threads, and whole tiles.
  int64_t together = std::max<int64_t>(1, row_channels * s.groups * panels / (3 * parallel.width()));
  together = ceil_div(together * own, loop.rows) * loop.rows / own;
  together = std::max<int64_t>(1, std::min({together, ceil_div(512, own), row_channels}));
  const int64_t pieces = ceil_div(row_channels, together), units = s.groups * pieces * panels;
  const std::vector<TapGroup> tap_groups = group_taps(s);
  const auto group_count = static_cast<int64_t>(tap_groups.size());
  int64_t most = 0;
  for (const TapGroup& each : tap_groups) most = std::max(most, each.taps.last - each.taps.first);
  const int64_t group_rows = padded_rows(together * most);
  const int64_t sums_size = group_count * group_rows * cut.width_of(0);
  each_unit(units, sums_size, parallel, workspace, [&](int64_t unit, float* sums) {
    const int64_t panel = unit % panels, piece = unit / panels % pieces, group = unit / panels / pieces;
    const int64_t first = piece * together, count = std::min(together, row_channels - first);
    const float* data = rows_of.data + (group * row_channels + first) * rows_of.plane;
    const float* block = packed + group * group_size + panel * all_pixels * cut.width;
    const int64_t width = cut.width_of(panel), lanes = std::min(width, cut.rest(panel));
    std::memset(sums, 0, static_cast<size_t>(sums_size) * sizeof(float));
    for (int64_t n = 0; n < (by_slice ? s.batch : 1); ++n) {
      for (int64_t begin = 0; begin < blocks.total; begin += blocks.planes) {
        const int64_t end = std::min(blocks.total, begin + blocks.planes);
        for (int64_t top = 0; top < s.out.h; top += blocks.lines) {
          for (int64_t g = 0; g < group_count; ++g) {
            const TapGroup& live = tap_groups[static_cast<size_t>(g)];
            const int64_t from = by_slice ? std::max(begin, live.slices.first) : begin;
            const int64_t many = (by_slice ? std::min(end, live.slices.last) : end) - from;
            const int64_t line = std::max(top, live.lines.first), own_taps = live.taps.last - live.taps.first;
            const int64_t lower = std::min({top + blocks.lines, s.out.h, live.lines.last}) - line;
            if (lower <= 0 || many <= 0) continue;
            const int64_t rest = (plane - lower * s.out.w) * width;
            const Walk walk = pitch == s.out.w ? Walk{lower * s.out.w, 1, 0, many, jump, rest}
                                               : Walk{s.out.w, lower, pitch, many, jump, rest};
            const float* row = data + n * image + from * jump + line * pitch;
            const int64_t* offset = offsets.data() + live.taps.first;
            multiply(count * own_taps, cut.vectors(panel), walk,
                     block + (n * plane_out + from * plane + line * s.out.w) * width, sums + g * group_rows * width,
                     [&](int64_t r) { return row + r / own_taps * rows_of.plane + offset[r % own_taps]; });
          }
        }
      }
    }
    if (turned) {
      for (int64_t row = 0; row < count; ++row) {
        std::memcpy(grad_weight + (group * outs + first + row) * ins + panel * cut.width, sums + row * width,
                    static_cast<size_t>(lanes) * sizeof(float));
      }
      return;
    }
    for (int64_t o = 0; o < lanes; ++o) {
      float* to = grad_weight + ((group * outs + panel * cut.width + o) * ins + first) * own;
      for (int64_t g = 0; g < group_count; ++g) {
        const Taps& live = tap_groups[static_cast<size_t>(g)].taps;
        const float* at = sums + g * group_rows * width + o;
        const int64_t runs = group_count > 1 ? count : 1,
                      length = group_count > 1 ? live.last - live.first : count * own;
        for (int64_t c = 0; c < runs; ++c) {
          float* run = to + c * own + live.first;
          for (int64_t t = 0; t < length; ++t, at += width) run[t] = *at;
        }
      }
    }
  });
}

// For groups of few outputs, which would leave most lanes of a panel empty.
void patch_gradient(const Convolution& s, const PlaneLayout& layout, const std::vector<int64_t>& offsets,
                    const InputPlanes& planes, const float* grad, float* grad_weight, Parallel& parallel,
                    Workspace& workspace) {
  const Loops& loop = loops();
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, columns = ins * taps(s);
  const int64_t plane_out = pixels_out(s), pitch = layout.columns.length;
  std::vector<int64_t> patch;
  for (int64_t c = 0; c < ins; ++c) {
    for (const int64_t offset : offsets) patch.push_back(c * planes.plane + offset);
  }
  const Panels cut(columns);
  const int64_t lines = std::max<int64_t>(1, std::min(s.out.h, kPanelSteps / s.out.w));
  const int64_t line_blocks = ceil_div(s.out.h, lines);
  const int64_t packed_size = lines * s.out.w * cut.width_of(0), sums_size = padded_rows(outs) * cut.width_of(0);
  each_unit(s.groups * cut.count, packed_size + sums_size, parallel, workspace, [&](int64_t unit, float* packed) {
    const int64_t panel = unit % cut.count, group = unit / cut.count, width = cut.width_of(panel);
    const int64_t lanes = std::min(width, cut.rest(panel));
    float* sums = packed + packed_size;
    std::memset(sums, 0, static_cast<size_t>(sums_size) * sizeof(float));
    for (int64_t n = 0; n < s.batch; ++n) {
      const float* source = planes.data + (n * s.groups + group) * ins * planes.plane;
      const float* g = grad + (n * s.groups + group) * outs * plane_out;
      for (int64_t k = 0; k < s.depth.out * line_blocks; ++k) {
        const int64_t z = k / line_blocks, line = k % line_blocks * lines;
        const int64_t lower = std::min(lines, s.out.h - line), run = pitch == s.out.w ? lower * s.out.w : s.out.w;
        for (int64_t at = 0; at < lower * s.out.w; at += run) {
          loop.transpose(source + z * s.depth.stride * layout.slice() + (line + at / s.out.w) * pitch,
                         patch.data() + panel * cut.width, lanes, run, width, packed + at * width);
        }
        multiply(outs, cut.vectors(panel), Walk{lower * s.out.w, 1, 0, 1, 0, 0}, packed, sums,
                 [&](int64_t r) { return g + r * plane_out + (z * s.out.h + line) * s.out.w; });
      }
    }
    for (int64_t o = 0; o < outs; ++o) {
      std::memcpy(grad_weight + (group * outs + o) * columns + panel * cut.width, sums + o * width,
                  static_cast<size_t>(lanes) * sizeof(float));
    }
  });
}

}  // namespace

void weight_gradient(const Convolution& s, const float* grad, const float* x, float* grad_weight, Parallel& parallel,
                     Workspace& workspace) {
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups, own = taps(s);
  if (s.outputs * ins * own == 0) return;
  if (s.batch == 0 || pixels_out(s) == 0) {
    std::memset(grad_weight, 0, static_cast<size_t>(s.outputs * ins * own) * sizeof(float));
    return;
  }
  std::vector<int64_t> offsets;
  const PlaneLayout layout = input_planes(s, &offsets);
  if (is_depthwise(s)) return depthwise_weight_gradient(s, layout, offsets, grad, x, grad_weight, parallel, workspace);
  const InputPlanes planes = make_planes(layout, x, s.batch * s.channels, parallel, workspace);
  if (s.groups > 1 && outs < loops().lanes && ins * own > outs) {
    patch_gradient(s, layout, offsets, planes, grad, grad_weight, parallel, workspace);
  } else {
    transposed_gradient(s, layout, offsets, planes, grad, x, grad_weight, parallel, workspace);
  }
}

}  // namespace bnexport::cpu
