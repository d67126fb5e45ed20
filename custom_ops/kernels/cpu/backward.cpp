// Backward: A = sum dy and B = sum dy * x_hat, then dx = scale * ((dy - offset) - (x - mean) * slope) + rest.
//
// The same two ways as forward.cpp: by groups of channels, or all sums first.
#include <vector>

#include "kernels.h"
#include "plan.h"
#include "table.h"

namespace bnexport::cpu {

namespace {

using Bytes = unsigned char;

class Backward {
 public:
  Backward(const bnexport_backward& params, Parallel& parallel)
      : params_(params),
        loops_(table(params.dtype)),
        parallel_(parallel),
        elements_(params.N * params.C * params.S),
        columns_(reads_columns(params.layout, params.S)),
        stream_(!caches().hold(3 * elements_ * loops_.element_size)) {}

  // sum dy and sum dy * x_hat of every channel.
  std::vector<GradientSums> sums() const {
    if (elements_ == 0) return std::vector<GradientSums>(static_cast<size_t>(params_.C));
    std::vector<GradientSums> all = columns_ ? column_sums() : row_sums();
    for (int64_t c = 0; c < params_.C; ++c) all[static_cast<size_t>(c)].dy_x_hat *= params_.saved_invstd[c];
    return all;
  }

  void run() const {
    const bool needs_sums =
        (params_.training && params_.dx != nullptr) || params_.dweight != nullptr || params_.dbias != nullptr;
    const GroupShare share = params_.training ? group_share(params_) : GroupShare{};
    if (params_.group_size == 1 && needs_sums && elements_ > 0 && !columns_) {
      const RowPlan plan(params_.N, params_.C, params_.S);
      const GroupPlan groups(plan, loops_.element_size, 2, parallel_.width(), caches());
      if (groups.channels > 0) {
        by_groups(plan, groups, share);
        return;
      }
    }
    std::vector<GradientSums> local(static_cast<size_t>(params_.C));
    if (params_.group_size > 1) {
      for (int64_t c = 0; c < params_.C; ++c) {
        local[static_cast<size_t>(c)] = {params_.local_moments[1 + c], params_.local_moments[1 + params_.C + c]};
      }
    } else if (needs_sums) {
      local = sums();
    }
    std::vector<BackwardCoefficients> coefficients(static_cast<size_t>(params_.C));
    for (int64_t c = 0; c < params_.C; ++c) {
      coefficients[static_cast<size_t>(c)] = finish_backward(params_, c, local[static_cast<size_t>(c)], share);
    }
    if (elements_ == 0 || params_.dx == nullptr) return;
    if (columns_) {
      gradient_columns(coefficients);
    } else {
      gradient_rows(coefficients);
    }
  }

 private:
  const void* dy(int64_t offset) const { return static_cast<const Bytes*>(params_.dy) + offset * loops_.element_size; }
  const void* x(int64_t offset) const { return static_cast<const Bytes*>(params_.x) + offset * loops_.element_size; }
  void* dx(int64_t offset) const { return static_cast<Bytes*>(params_.dx) + offset * loops_.element_size; }

  // With fixed statistics dx = scale * dy, and x is not read: an infinite x must not make dx NaN.
  static ForwardCoefficients fixed(const BackwardCoefficients& k) { return {0, k.scale, 0}; }

  void by_groups(const RowPlan& plan, const GroupPlan& groups, const GroupShare& share) const {
    parallel_for(parallel_, groups.groups, [&](int64_t group) {
      const int64_t first = group * groups.channels;
      const int64_t last = first + groups.channels < plan.C ? first + groups.channels : plan.C;
      GradientSums all[kMostChannels];
      BackwardCoefficients coefficients[kMostChannels];
      ForwardCoefficients scales[kMostChannels];
      plan.each_block(first, last, [&](int64_t, int64_t offset, Span span, int64_t c, int64_t channels) {
        loops_.gradient_sums(dy(offset), x(offset), span, channels, params_.saved_mean + c, all + (c - first));
      });
      for (int64_t c = first; c < last; ++c) {
        all[c - first].dy_x_hat *= params_.saved_invstd[c];
        coefficients[c - first] = finish_backward(params_, c, all[c - first], share);
        scales[c - first] = fixed(coefficients[c - first]);
      }
      if (params_.dx == nullptr) return;
      const int64_t start = first * plan.S;
      const Span slab{plan.N, plan.S, plan.C * plan.S};
      if (params_.training) {
        loops_.gradient(dy(start), x(start), dx(start), slab, last - first, coefficients, stream_);
      } else {
        loops_.normalise(dy(start), dx(start), slab, last - first, scales, stream_);
      }
    });
  }

  std::vector<GradientSums> row_sums() const {
    const RowPlan plan(params_.N, params_.C, params_.S);
    std::vector<GradientSums> blocks(static_cast<size_t>(plan.blocks * plan.C)), channels(static_cast<size_t>(plan.C));
    parallel_for(parallel_, plan.tasks(), [&](int64_t task) {
      plan.each_block_of_task(task, [&](int64_t b, int64_t offset, Span span, int64_t c, int64_t count) {
        loops_.gradient_sums(dy(offset), x(offset), span, count, params_.saved_mean + c,
                             blocks.data() + b * plan.C + c);
      });
    });
    for (size_t i = 0; i < blocks.size(); ++i) add(channels[i % static_cast<size_t>(plan.C)], blocks[i]);
    return channels;
  }

  std::vector<GradientSums> column_sums() const {
    const ColumnPlan plan(params_.N, params_.C, params_.S, params_.layout == BNEXPORT_NSC);
    const int64_t chunks = plan.all_chunks();
    std::vector<double> means(static_cast<size_t>(plan.cols));
    for (int64_t j = 0; j < plan.cols; ++j) means[static_cast<size_t>(j)] = params_.saved_mean[plan.channel(j)];
    std::vector<GradientSums> parts(static_cast<size_t>(chunks * plan.cols)), channels(static_cast<size_t>(plan.C));
    parallel_for(parallel_, chunks, [&](int64_t k) {
      Span span;
      const int64_t offset = plan.chunk(k, &span);
      loops_.column_gradient_sums(dy(offset), x(offset), span, means.data(), parts.data() + k * plan.cols);
    });
    for (int64_t k = 0; k < chunks; ++k) {
      Span span;
      plan.chunk(k, &span);
      for (int64_t j = 0; j < span.cols; ++j) {
        add(channels[static_cast<size_t>(plan.channel(j))], parts[static_cast<size_t>(k * plan.cols + j)]);
      }
    }
    return channels;
  }

  static void add(GradientSums& to, const GradientSums& from) {
    to.dy += from.dy;
    to.dy_x_hat += from.dy_x_hat;
  }

  void gradient_rows(const std::vector<BackwardCoefficients>& coefficients) const {
    // Last task first: the end of the tensor is what the statistics left in cache.
    const StreamPlan plan(params_.N, params_.C, params_.S);
    std::vector<ForwardCoefficients> scales;
    scales.reserve(coefficients.size());
    for (const BackwardCoefficients& k : coefficients) scales.push_back(fixed(k));
    parallel_for(parallel_, plan.tasks, [&](int64_t task) {
      plan.each(plan.tasks - 1 - task, [&](int64_t offset, int64_t length, int64_t c, int64_t channels) {
        const Span rows{1, length, length};
        if (params_.training) {
          loops_.gradient(dy(offset), x(offset), dx(offset), rows, channels, coefficients.data() + c, stream_);
        } else {
          loops_.normalise(dy(offset), dx(offset), rows, channels, scales.data() + c, stream_);
        }
      });
    });
  }

  void gradient_columns(const std::vector<BackwardCoefficients>& coefficients) const {
    const ColumnPlan plan(params_.N, params_.C, params_.S, params_.layout == BNEXPORT_NSC);
    std::vector<BackwardCoefficients> columns(static_cast<size_t>(plan.cols));
    std::vector<ForwardCoefficients> scales(static_cast<size_t>(plan.cols));
    for (int64_t j = 0; j < plan.cols; ++j) {
      columns[static_cast<size_t>(j)] = coefficients[static_cast<size_t>(plan.channel(j))];
      scales[static_cast<size_t>(j)] = fixed(columns[static_cast<size_t>(j)]);
    }
    parallel_for(parallel_, plan.all_chunks(), [&](int64_t k) {
      Span span;
      const int64_t offset = plan.chunk(k, &span);
      if (params_.training) {
        loops_.column_gradient(dy(offset), x(offset), dx(offset), span, columns.data(), stream_);
      } else {
        loops_.column_normalise(dy(offset), dx(offset), span, scales.data(), stream_);
      }
    });
  }

  const bnexport_backward& params_;
  const Table& loops_;
  Parallel& parallel_;
  const int64_t elements_;
  const bool columns_, stream_;
};

}  // namespace

void backward_row(const bnexport_backward& params, Parallel& parallel, double* row) {
  const std::vector<GradientSums> sums = Backward(params, parallel).sums();
  row[0] = row_weight(params.stats_mode, params.N, params.S);
  for (int64_t c = 0; c < params.C; ++c) {
    row[1 + c] = sums[static_cast<size_t>(c)].dy;
    row[1 + params.C + c] = sums[static_cast<size_t>(c)].dy_x_hat;
  }
}

void backward(const bnexport_backward& params, Parallel& parallel) { Backward(params, parallel).run(); }

}  // namespace bnexport::cpu
