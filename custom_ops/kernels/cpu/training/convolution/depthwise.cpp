#include "depthwise.h"

#include <algorithm>
#include <cstring>

#include "loops.h"

namespace bnexport::cpu {

namespace {

// How far the loops go past the end of a plane.
constexpr int64_t kMargin = 4 * kSlack;

// Runs body(i, scratch) for each i in [0, count) with at least `size` floats of scratch memory, aligned as the
// workspace is and zero at the start of a thread's work.
template <class Body>
void for_each(int64_t count, int64_t least, Parallel& parallel, Workspace& workspace, const Body& body) {
  const int64_t size = (least + 15) / 16 * 16;
  const int64_t tasks = std::min(count, 4 * parallel.width());
  auto* scratch = static_cast<float*>(workspace.allocate(static_cast<size_t>(tasks * size) * sizeof(float)));
  parallel_for(parallel, tasks, [&](int64_t task) {
    float* own = scratch + task * size;
    std::memset(own, 0, static_cast<size_t>(size) * sizeof(float));
    for (int64_t i = task * count / tasks; i < (task + 1) * count / tasks; ++i) body(i, own);
  });
}

// Positions from the first output to the last, those between two rows included.
int64_t span(const Pair& extents, int64_t pitch) { return (extents.h - 1) * pitch + extents.w; }

}  // namespace

void depthwise_convolve(const Convolution& s, const PlaneLayout& layout, const std::vector<int64_t>& offsets,
                        const float* x, const float* weight, const float* bias, float* y, Parallel& parallel,
                        Workspace& workspace) {
  const auto taps = static_cast<int64_t>(offsets.size());
  const int64_t pitch = layout.columns.length, count = span(s.out, pitch), plane = layout.size() + kMargin;
  for_each(s.batch * s.channels, plane + count + kMargin, parallel, workspace, [&](int64_t i, float* scratch) {
    const int64_t c = i % s.channels;
    layout.fill(x + i * s.in.h * s.in.w, scratch);
    float* flat = scratch + plane;
    loops().correlate(scratch, offsets.data(), weight + c * taps, taps, bias == nullptr ? 0.0f : bias[c], count, flat);
    float* to = y + i * s.out.h * s.out.w;
    for (int64_t row = 0; row < s.out.h; ++row) {
      std::memcpy(to + row * s.out.w, flat + row * pitch, static_cast<size_t>(s.out.w) * sizeof(float));
    }
  });
}

void depthwise_input_gradient(const Convolution& s, const PlaneLayout& layout, const std::vector<GradientPhase>& phases,
                              const float* grad, const float* weight, float* grad_input, Parallel& parallel,
                              Workspace& workspace) {
  const int64_t all = s.kernel.h * s.kernel.w, pitch = layout.columns.length;
  const int64_t plane = layout.size() + kMargin;
  for_each(s.batch * s.channels, 2 * plane + all, parallel, workspace, [&](int64_t i, float* scratch) {
    layout.fill(grad + i * s.out.h * s.out.w, scratch);
    float* flat = scratch + plane;
    float* chosen = flat + plane;
    for (const GradientPhase& phase : phases) {
      const auto taps = static_cast<int64_t>(phase.taps.size());
      if (phase.slices <= 0 || phase.count.h <= 0 || phase.count.w <= 0) continue;
      for (int64_t t = 0; t < taps; ++t) chosen[t] = weight[i % s.channels * all + phase.taps[static_cast<size_t>(t)]];
      loops().correlate(scratch + phase.base.h * pitch + phase.base.w, phase.offsets.data(), chosen, taps, 0.0f,
                        span(phase.count, pitch), flat);
      for (int64_t row = 0; row < phase.count.h; ++row) {
        float* to = grad_input + (i * s.in.h + phase.first.h + row * s.stride.h) * s.in.w + phase.first.w;
        const float* from = flat + row * pitch;
        for (int64_t j = 0; j < phase.count.w; ++j) to[j * s.stride.w] = from[j];
      }
    }
  });
}

void depthwise_weight_gradient(const Convolution& s, const PlaneLayout& layout, const std::vector<int64_t>& offsets,
                               const float* grad, const float* x, float* grad_weight, Parallel& parallel,
                               Workspace& workspace) {
  const auto taps = static_cast<int64_t>(offsets.size());
  const int64_t pitch = layout.columns.length, count = span(s.out, pitch), plane = layout.size() + kMargin;
  // The sums come first, as doubles.
  for_each(s.channels, 2 * taps + plane + count + kMargin, parallel, workspace, [&](int64_t c, float* memory) {
    auto* const sums = reinterpret_cast<double*>(memory);
    float* const scratch = memory + 2 * taps;
    // Zero between the rows, where the planes hold values that no output sees.
    float* flat = scratch + plane;
    std::fill_n(sums, taps, 0.0);
    for (int64_t n = 0; n < s.batch; ++n) {
      const int64_t i = n * s.channels + c;
      layout.fill(x + i * s.in.h * s.in.w, scratch);
      for (int64_t row = 0; row < s.out.h; ++row) {
        std::memcpy(flat + row * pitch, grad + (i * s.out.h + row) * s.out.w,
                    static_cast<size_t>(s.out.w) * sizeof(float));
      }
      loops().correlations(flat, scratch, offsets.data(), taps, count, sums);
    }
    for (int64_t t = 0; t < taps; ++t) grad_weight[c * taps + t] = static_cast<float>(sums[t]);
  });
}

}  // namespace bnexport::cpu
