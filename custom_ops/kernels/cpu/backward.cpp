// Backward: A = sum dy and B = sum dy * x_hat, then dx = scale * ((dy - offset) - (x - mean) * slope).
//
// The same two ways as forward.cpp: channel by channel while the slabs are in cache, or all sums first.
#include <vector>

#include "kernels.h"
#include "plan.h"
#include "table.h"

namespace bnexport::cpu {

namespace {

using Bytes = unsigned char;

struct Backward {
  const bnexport_backward& params;
  const Table& loops;
  Parallel& parallel;

  Backward(const bnexport_backward& params, Parallel& parallel)
      : params(params), loops(table(params.dtype)), parallel(parallel) {}

  int64_t elements() const { return params.N * params.C * params.S; }
  const void* dy(int64_t offset) const { return static_cast<const Bytes*>(params.dy) + offset * loops.element_size; }
  const void* x(int64_t offset) const { return static_cast<const Bytes*>(params.x) + offset * loops.element_size; }
  void* dx(int64_t offset) const { return static_cast<Bytes*>(params.dx) + offset * loops.element_size; }

  // The loops sum dy * (x - mean); B has x_hat.
  GradientSums scaled(int64_t c, GradientSums sums) const {
    return {sums.dy, sums.dy_x_hat * params.saved_invstd[c]};
  }

  GradientSums channel_sums(const RowPlan& plan, int64_t c) const {
    GradientSums all;
    for (int64_t b = 0; b < plan.blocks; ++b) {
      Span span;
      const int64_t offset = plan.block(b, &span) + c * plan.S;
      const GradientSums block = loops.gradient_sums(dy(offset), x(offset), span, params.saved_mean[c]);
      all.dy += block.dy;
      all.dy_x_hat += block.dy_x_hat;
    }
    return scaled(c, all);
  }

  std::vector<GradientSums> row_sums() const {
    const RowPlan plan(params.N, params.C, params.S);
    const int64_t all = plan.C * plan.blocks;
    std::vector<GradientSums> blocks(static_cast<size_t>(all)), channels(static_cast<size_t>(plan.C));
    const int64_t block_size = plan.pieces > 1 ? plan.S / plan.pieces : plan.rows_per_block * plan.S;
    const int64_t per_task = ceil_div(kTask, block_size);
    const auto work = [&](int64_t task) {
      for (int64_t i = task * per_task; i < all && i < (task + 1) * per_task; ++i) {
        Span span;
        const int64_t c = i / plan.blocks, offset = plan.block(i % plan.blocks, &span) + c * plan.S;
        blocks[static_cast<size_t>(i)] = loops.gradient_sums(dy(offset), x(offset), span, params.saved_mean[c]);
      }
    };
    parallel_for(parallel, ceil_div(all, per_task), work);
    for (int64_t i = 0; i < all; ++i) add(channels[static_cast<size_t>(i / plan.blocks)], blocks[static_cast<size_t>(i)]);
    return channels;
  }

  std::vector<GradientSums> column_sums() const {
    const ColumnPlan plan(params.N, params.C, params.S, params.layout == BNEXPORT_NSC);
    const int64_t chunks = plan.all_chunks();
    std::vector<double> means(static_cast<size_t>(plan.cols));
    for (int64_t j = 0; j < plan.cols; ++j) means[static_cast<size_t>(j)] = params.saved_mean[plan.channel(j)];
    std::vector<GradientSums> partial(static_cast<size_t>(chunks * plan.cols)), channels(static_cast<size_t>(plan.C));
    parallel_for(parallel, chunks, [&](int64_t k) {
      Span span;
      const int64_t offset = plan.chunk(k, &span);
      loops.column_gradient_sums(dy(offset), x(offset), span, means.data(), partial.data() + k * plan.cols);
    });
    for (int64_t k = 0; k < chunks; ++k) {
      Span span;
      plan.chunk(k, &span);
      for (int64_t j = 0; j < span.cols; ++j) {
        add(channels[static_cast<size_t>(plan.channel(j))], partial[static_cast<size_t>(k * plan.cols + j)]);
      }
    }
    return channels;
  }

  static void add(GradientSums& to, const GradientSums& from) {
    to.dy += from.dy;
    to.dy_x_hat += from.dy_x_hat;
  }

  std::vector<GradientSums> all_sums() const {
    if (elements() == 0) return std::vector<GradientSums>(static_cast<size_t>(params.C));
    std::vector<GradientSums> sums = reads_columns(params.layout, params.S) ? column_sums() : row_sums();
    for (int64_t c = 0; c < params.C; ++c) sums[static_cast<size_t>(c)] = scaled(c, sums[static_cast<size_t>(c)]);
    return sums;
  }

  void gradient(const std::vector<BackwardCoefficients>& coefficients) const {
    if (elements() == 0 || params.dx == nullptr) return;
    if (reads_columns(params.layout, params.S)) {
      const ColumnPlan plan(params.N, params.C, params.S, params.layout == BNEXPORT_NSC);
      std::vector<BackwardCoefficients> columns(static_cast<size_t>(plan.cols));
      std::vector<ForwardCoefficients> fixed(static_cast<size_t>(plan.cols));
      for (int64_t j = 0; j < plan.cols; ++j) {
        columns[static_cast<size_t>(j)] = coefficients[static_cast<size_t>(plan.channel(j))];
        fixed[static_cast<size_t>(j)] = {0, columns[static_cast<size_t>(j)].scale, 0};
      }
      parallel_for(parallel, plan.all_chunks(), [&](int64_t k) {
        Span span;
        const int64_t offset = plan.chunk(k, &span);
        if (params.training) {
          loops.column_gradient(dy(offset), x(offset), dx(offset), span, columns.data());
        } else {
          loops.column_normalise(dy(offset), dx(offset), span, fixed.data());
        }
      });
      return;
    }
    const StreamPlan plan(params.N, params.C, params.S);
    parallel_for(parallel, plan.tasks, [&](int64_t task) {
      plan.each(task, [&](int64_t c, int64_t offset, int64_t length) {
        apply(offset, {1, length, length}, coefficients[static_cast<size_t>(c)]);
      });
    });
  }

  // With fixed statistics x is not read: an infinite x must not turn dx into NaN.
  void apply(int64_t offset, Span span, const BackwardCoefficients& k) const {
    if (params.training) {
      loops.gradient(dy(offset), x(offset), dx(offset), span, k, false);
    } else {
      loops.normalise(dy(offset), dx(offset), span, {0, k.scale, 0}, false);
    }
  }

  bool needs_sums() const {
    return (params.training && params.dx != nullptr) || params.dweight != nullptr || params.dbias != nullptr;
  }

  bool takes_channels_one_by_one() const {
    return params.group_size == 1 && elements() > 0 && !reads_columns(params.layout, params.S) && needs_sums() &&
           (elements() < kSerial || params.C >= 2 * parallel.width());
  }

  void by_channel() const {
    const RowPlan plan(params.N, params.C, params.S);
    const GroupShare share = group_share(params);
    const int64_t per_task = ceil_div(kTask, params.N * params.S);
    parallel_for(parallel, ceil_div(params.C, per_task), [&](int64_t task) {
      for (int64_t c = task * per_task; c < params.C && c < (task + 1) * per_task; ++c) {
        const BackwardCoefficients k = finish_backward(params, c, channel_sums(plan, c), share);
        if (params.dx != nullptr) apply(c * params.S, {params.N, params.S, params.C * params.S}, k);
      }
    });
  }

  void run() const {
    if (takes_channels_one_by_one()) {
      by_channel();
      return;
    }
    std::vector<GradientSums> local(static_cast<size_t>(params.C));
    if (params.local_moments != nullptr && params.group_size > 1) {
      for (int64_t c = 0; c < params.C; ++c) {
        local[static_cast<size_t>(c)] = {params.local_moments[1 + c], params.local_moments[1 + params.C + c]};
      }
    } else if (needs_sums()) {
      local = all_sums();
    }
    const GroupShare share = params.training ? group_share(params) : GroupShare{};
    std::vector<BackwardCoefficients> coefficients(static_cast<size_t>(params.C));
    for (int64_t c = 0; c < params.C; ++c) {
      coefficients[static_cast<size_t>(c)] = finish_backward(params, c, local[static_cast<size_t>(c)], share);
    }
    gradient(coefficients);
  }
};

}  // namespace

void backward_row(const bnexport_backward& params, Parallel& parallel, double* row) {
  const std::vector<GradientSums> sums = Backward(params, parallel).all_sums();
  row[0] = row_weight(params.stats_mode, params.N, params.S);
  for (int64_t c = 0; c < params.C; ++c) {
    row[1 + c] = sums[static_cast<size_t>(c)].dy;
    row[1 + params.C + c] = sums[static_cast<size_t>(c)].dy_x_hat;
  }
}

void backward(const bnexport_backward& params, Parallel& parallel) { Backward(params, parallel).run(); }

}  // namespace bnexport::cpu
