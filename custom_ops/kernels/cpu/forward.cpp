// Forward: statistics of the batch, then y = (x - mean) * scale + bias.
//
// One process with enough channels takes them one by one, so that the second read of a channel's slab
// comes from cache. Otherwise all statistics first, in blocks over all threads, then the output.
#include <vector>

#include "kernels.h"
#include "plan.h"
#include "table.h"

namespace bnexport::cpu {

namespace {

using Bytes = unsigned char;

struct Forward {
  const bnexport_forward& params;
  const Table& loops;
  Parallel& parallel;
  const Bytes* x;
  Bytes* y;

  Forward(const bnexport_forward& params, Parallel& parallel)
      : params(params), loops(table(params.dtype)), parallel(parallel),
        x(static_cast<const Bytes*>(params.x)), y(static_cast<Bytes*>(params.y)) {}

  int64_t elements() const { return params.N * params.C * params.S; }
  const void* from(int64_t offset) const { return x + offset * loops.element_size; }
  void* to(int64_t offset) const { return y + offset * loops.element_size; }

  Moments channel_moments(const RowPlan& plan, int64_t c) const {
    Moments all;
    for (int64_t b = 0; b < plan.blocks; ++b) {
      Span span;
      const int64_t offset = plan.block(b, &span) + c * plan.S;
      all.merge(loops.moments(from(offset), span));
    }
    return all;
  }

  std::vector<Moments> row_moments() const {
    const RowPlan plan(params.N, params.C, params.S);
    std::vector<Moments> blocks(static_cast<size_t>(plan.C * plan.blocks));
    const int64_t block_size = plan.pieces > 1 ? plan.S / plan.pieces : plan.rows_per_block * plan.S;
    const int64_t per_task = ceil_div(kTask, block_size);
    const int64_t all = plan.C * plan.blocks;
    const auto work = [&](int64_t task) {
      for (int64_t i = task * per_task; i < all && i < (task + 1) * per_task; ++i) {
        Span span;
        const int64_t offset = plan.block(i % plan.blocks, &span) + i / plan.blocks * plan.S;
        blocks[static_cast<size_t>(i)] = loops.moments(from(offset), span);
      }
    };
    parallel_for(parallel, ceil_div(all, per_task), work);
    std::vector<Moments> channels(static_cast<size_t>(plan.C));
    for (int64_t i = 0; i < all; ++i) {
      channels[static_cast<size_t>(i / plan.blocks)].merge(blocks[static_cast<size_t>(i)]);
    }
    return channels;
  }

  std::vector<Moments> column_moments() const {
    const ColumnPlan plan(params.N, params.C, params.S, params.layout == BNEXPORT_NSC);
    const int64_t chunks = plan.all_chunks();
    std::vector<double> means(static_cast<size_t>(chunks * plan.cols)), m2s(means.size());
    const auto work = [&](int64_t k) {
      Span span;
      const int64_t offset = plan.chunk(k, &span);
      loops.column_moments(from(offset), span, means.data() + k * plan.cols, m2s.data() + k * plan.cols);
    };
    parallel_for(parallel, chunks, work);
    std::vector<Moments> channels(static_cast<size_t>(plan.C));
    for (int64_t k = 0; k < chunks; ++k) {
      Span span;
      plan.chunk(k, &span);
      for (int64_t j = 0; j < span.cols; ++j) {
        const auto at = static_cast<size_t>(k * plan.cols + j);
        channels[static_cast<size_t>(plan.channel(j))].merge({static_cast<double>(span.rows), means[at], m2s[at]});
      }
    }
    return channels;
  }

  std::vector<Moments> all_moments() const {
    if (elements() == 0) return std::vector<Moments>(static_cast<size_t>(params.C));
    return reads_columns(params.layout, params.S) ? column_moments() : row_moments();
  }

  void normalise(const std::vector<ForwardCoefficients>& coefficients) const {
    if (elements() == 0) return;
    if (reads_columns(params.layout, params.S)) {
      const ColumnPlan plan(params.N, params.C, params.S, params.layout == BNEXPORT_NSC);
      std::vector<ForwardCoefficients> columns(static_cast<size_t>(plan.cols));
      for (int64_t j = 0; j < plan.cols; ++j) {
        columns[static_cast<size_t>(j)] = coefficients[static_cast<size_t>(plan.channel(j))];
      }
      parallel_for(parallel, plan.all_chunks(), [&](int64_t k) {
        Span span;
        const int64_t offset = plan.chunk(k, &span);
        loops.column_normalise(from(offset), to(offset), span, columns.data());
      });
      return;
    }
    const StreamPlan plan(params.N, params.C, params.S);
    parallel_for(parallel, plan.tasks, [&](int64_t task) {
      plan.each(task, [&](int64_t c, int64_t offset, int64_t length) {
        loops.normalise(from(offset), to(offset), {1, length, length}, coefficients[static_cast<size_t>(c)], false);
      });
    });
  }

  void training_by_channel() const {
    const RowPlan plan(params.N, params.C, params.S);
    const int64_t per_task = ceil_div(kTask, params.N * params.S);
    parallel_for(parallel, ceil_div(params.C, per_task), [&](int64_t task) {
      for (int64_t c = task * per_task; c < params.C && c < (task + 1) * per_task; ++c) {
        const GroupStatistics statistics = local_statistics(params, channel_moments(plan, c));
        const ForwardCoefficients k = finish_training(params, c, statistics);
        loops.normalise(from(c * params.S), to(c * params.S), {params.N, params.S, params.C * params.S}, k, false);
      }
    });
  }

  bool takes_channels_one_by_one() const {
    return params.group_size == 1 && elements() > 0 && !reads_columns(params.layout, params.S) &&
           (elements() < kSerial || params.C >= 2 * parallel.width());
  }

  void run() const {
    if (params.training && takes_channels_one_by_one()) {
      training_by_channel();
      return;
    }
    std::vector<ForwardCoefficients> coefficients(static_cast<size_t>(params.C));
    std::vector<Moments> moments;
    if (params.training && params.group_size == 1) moments = all_moments();
    for (int64_t c = 0; c < params.C; ++c) {
      const auto at = static_cast<size_t>(c);
      coefficients[at] =
          !params.training         ? finish_inference(params, c)
          : params.group_size == 1 ? finish_training(params, c, local_statistics(params, moments[at]))
                                   : finish_training(params, c, gathered_statistics(params, c));
    }
    normalise(coefficients);
  }
};

}  // namespace

void forward_row(const bnexport_forward& params, Parallel& parallel, double* row) {
  const std::vector<Moments> moments = Forward(params, parallel).all_moments();
  row[0] = row_weight(params.stats_mode, params.N, params.S);
  for (int64_t c = 0; c < params.C; ++c) {
    row[1 + c] = moments[static_cast<size_t>(c)].mean;
    row[1 + params.C + c] = row_spread(params.stats_mode, moments[static_cast<size_t>(c)]);
  }
}

void forward(const bnexport_forward& params, Parallel& parallel) { Forward(params, parallel).run(); }

}  // namespace bnexport::cpu
