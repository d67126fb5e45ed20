// Forward: statistics of the batch, then y = (x - mean) * scale + bias.
//
// plan.h says how the tensor is cut: groups of channels whose second read comes from cache, or all
// statistics first and then the output. Both give the same bits.
#include <vector>

#include "kernels.h"
#include "plan.h"
#include "table.h"

namespace bnexport::cpu {

namespace {

using Bytes = unsigned char;

class Forward {
 public:
  Forward(const bnexport_forward& params, Parallel& parallel)
      : params_(params),
        loops_(table(params.dtype)),
        parallel_(parallel),
        elements_(params.N * params.C * params.S),
        columns_(reads_columns(params.layout, params.S)),
        stream_(!caches().hold(2 * elements_ * loops_.element_size)) {}

  std::vector<Moments> moments() const {
    if (elements_ == 0) return std::vector<Moments>(static_cast<size_t>(params_.C));
    return columns_ ? column_moments() : row_moments();
  }

  void run() const {
    if (params_.training && params_.group_size == 1 && elements_ > 0 && !columns_) {
      const RowPlan plan(params_.N, params_.C, params_.S);
      const GroupPlan groups(plan, loops_.element_size, 1, parallel_.width(), caches());
      if (groups.channels > 0) {
        train_by_groups(plan, groups);
        return;
      }
    }
    std::vector<ForwardCoefficients> coefficients(static_cast<size_t>(params_.C));
    std::vector<Moments> all;
    if (params_.training && params_.group_size == 1) all = moments();
    for (int64_t c = 0; c < params_.C; ++c) {
      const auto at = static_cast<size_t>(c);
      coefficients[at] = !params_.training         ? finish_inference(params_, c)
                         : params_.group_size == 1 ? finish_training(params_, c, local_statistics(all[at]))
                                                   : finish_training(params_, c, gathered_statistics(params_, c));
    }
    if (elements_ == 0) return;
    if (columns_) {
      normalise_columns(coefficients);
    } else {
      normalise_rows(coefficients);
    }
  }

 private:
  const void* x(int64_t offset) const { return static_cast<const Bytes*>(params_.x) + offset * loops_.element_size; }
  void* y(int64_t offset) const { return static_cast<Bytes*>(params_.y) + offset * loops_.element_size; }

  void train_by_groups(const RowPlan& plan, const GroupPlan& groups) const {
    parallel_for(parallel_, groups.groups, [&](int64_t group) {
      const int64_t first = group * groups.channels;
      const int64_t last = first + groups.channels < plan.C ? first + groups.channels : plan.C;
      Moments all[kMostChannels];
      ForwardCoefficients coefficients[kMostChannels];
      plan.each_block(first, last, [&](int64_t, int64_t offset, Span span, int64_t c, int64_t channels) {
        loops_.moments(x(offset), span, channels, all + (c - first));
      });
      for (int64_t c = first; c < last; ++c) {
        coefficients[c - first] = finish_training(params_, c, local_statistics(all[c - first]));
      }
      loops_.normalise(x(first * plan.S), y(first * plan.S), {plan.N, plan.S, plan.C * plan.S}, last - first,
                       coefficients, stream_);
    });
  }

  std::vector<Moments> row_moments() const {
    const RowPlan plan(params_.N, params_.C, params_.S);
    std::vector<Moments> blocks(static_cast<size_t>(plan.blocks * plan.C)), channels(static_cast<size_t>(plan.C));
    parallel_for(parallel_, plan.tasks(), [&](int64_t task) {
      plan.each_block_of_task(task, [&](int64_t b, int64_t offset, Span span, int64_t c, int64_t count) {
        loops_.moments(x(offset), span, count, blocks.data() + b * plan.C + c);
      });
    });
    for (int64_t b = 0; b < plan.blocks; ++b) loops_.merge(channels.data(), blocks.data() + b * plan.C, plan.C);
    return channels;
  }

  std::vector<Moments> column_moments() const {
    const ColumnPlan plan(params_.N, params_.C, params_.S, params_.layout == BNEXPORT_NSC);
    const int64_t chunks = plan.all_chunks();
    std::vector<double> means(static_cast<size_t>(chunks * plan.cols)), m2s(means.size());
    parallel_for(parallel_, chunks, [&](int64_t k) {
      Span span;
      const int64_t offset = plan.chunk(k, &span);
      loops_.column_moments(x(offset), span, means.data() + k * plan.cols, m2s.data() + k * plan.cols);
    });
    std::vector<Moments> channels(static_cast<size_t>(plan.C));
    for (int64_t k = 0; k < chunks; ++k) {
      Span span;
      plan.chunk(k, &span);
      for (int64_t j = 0; j < span.cols; ++j) {
        const auto at = static_cast<size_t>(k * plan.cols + j);
        const Moments part{static_cast<double>(span.rows), means[at], m2s[at]};
        loops_.merge(&channels[static_cast<size_t>(plan.channel(j))], &part, 1);
      }
    }
    return channels;
  }

  void normalise_rows(const std::vector<ForwardCoefficients>& coefficients) const {
    // Last task first: the end of the tensor is what the statistics left in cache.
    const StreamPlan plan(params_.N, params_.C, params_.S);
    parallel_for(parallel_, plan.tasks, [&](int64_t task) {
      plan.each(plan.tasks - 1 - task, [&](int64_t offset, int64_t length, int64_t c, int64_t channels) {
        loops_.normalise(x(offset), y(offset), {1, length, length}, channels, coefficients.data() + c, stream_);
      });
    });
  }

  void normalise_columns(const std::vector<ForwardCoefficients>& coefficients) const {
    const ColumnPlan plan(params_.N, params_.C, params_.S, params_.layout == BNEXPORT_NSC);
    std::vector<ForwardCoefficients> columns(static_cast<size_t>(plan.cols));
    for (int64_t j = 0; j < plan.cols; ++j) {
      columns[static_cast<size_t>(j)] = coefficients[static_cast<size_t>(plan.channel(j))];
    }
    parallel_for(parallel_, plan.all_chunks(), [&](int64_t k) {
      Span span;
      const int64_t offset = plan.chunk(k, &span);
      loops_.column_normalise(x(offset), y(offset), span, columns.data(), stream_);
    });
  }

  const bnexport_forward& params_;
  const Table& loops_;
  Parallel& parallel_;
  const int64_t elements_;
  const bool columns_, stream_;
};

}  // namespace

void forward_row(const bnexport_forward& params, Parallel& parallel, double* row) {
  const std::vector<Moments> moments = Forward(params, parallel).moments();
  row[0] = row_weight(params.stats_mode, params.N, params.S);
  for (int64_t c = 0; c < params.C; ++c) {
    row[1 + c] = moments[static_cast<size_t>(c)].mean;
    row[1 + params.C + c] = row_spread(params.stats_mode, moments[static_cast<size_t>(c)]);
  }
}

void forward(const bnexport_forward& params, Parallel& parallel) { Forward(params, parallel).run(); }

}  // namespace bnexport::cpu
