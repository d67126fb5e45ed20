// One direction over a tensor: a statistic of each channel, then the output.
//
// plan.h says how the tensor is cut: groups of channels whose second read comes from cache, or all statistics first and
// then the output. Both give the same bits.
//
// A direction has `params`, its `loops`, the type Statistic of what it measures, and reads kTensors tensors:
//
//   measures()                 whether the output needs statistics of this process
//   measure_rows, _columns     add blocks of rows to statistics, a chunk of columns to two numbers of each
//   add, _chunk, _columns      merge statistics, chunks of columns, the columns of channels (`inner` of each)
//   complete(c, statistic)     ends the statistic of a channel
//   finish(c, statistic)       writes what there is for a channel, and returns the coefficients of its output
//   write_rows, write_columns  the output
#pragma once

#include <vector>

#include "bands.h"
#include "kernels.h"
#include "plan.h"
#include "table.h"

namespace bnexport::cpu {

template <class Direction>
class Passes {
 public:
  using Statistic = typename Direction::Statistic;

  Passes(Direction direction, Parallel& parallel)
      : direction_(std::move(direction)),
        parallel_(parallel),
        N_(direction_.params.N),
        C_(direction_.params.C),
        S_(direction_.params.S),
        elements_(N_ * C_ * S_) {}

  // Of every channel of this process.
  std::vector<Statistic> statistics() {
    std::vector<Statistic> all(static_cast<size_t>(C_));
    if (elements_ == 0) return all;
    if (is_columns()) {
      const ColumnPlan plan = column_plan();
      ColumnParts parts = measure_columns(plan);
      parts.bands.each_piece(parallel_, elements_, [&](int64_t b, int64_t first, int64_t last) {
        merge_columns(parts, b, first, last, all.data() + first);
      });
    } else {
      measure_rows(all.data());
    }
    return all;
  }

  void run() {
    if (elements_ == 0) {
      for (int64_t c = 0; c < C_; ++c) direction_.finish(c, Statistic{});
    } else if (is_columns()) {
      run_columns();
    } else {
      run_rows();
    }
  }

 private:
  bool is_columns() const { return reads_columns(direction_.params.layout, S_); }
  ColumnPlan column_plan() const {
    return {N_, C_, S_, direction_.params.layout == BNEXPORT_NSC, direction_.loops.element_size};
  }
  CoefficientPlanes planes(int64_t columns) const {
    constexpr size_t kPlanes = sizeof(typename Direction::Coefficients) / sizeof(double);
    return {direction_.params.dtype, static_cast<int64_t>(kPlanes), columns};
  }

  void run_rows() const {
    CoefficientPlanes coefficients = planes(C_);
    std::vector<Statistic> all(static_cast<size_t>(C_));
    const auto finish = [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) coefficients.set(c, direction_.finish(c, all[static_cast<size_t>(c)]));
    };
    if (direction_.measures()) {
      const RowPlan plan(N_, C_, S_);
      const GroupPlan groups(plan, direction_.loops.element_size, Direction::kTensors, parallel_.width(), caches());
      if (groups.channels > 0) {
        return parallel_for(parallel_, groups.groups, [&](int64_t group) {
          const int64_t first = group * groups.channels;
          const int64_t last = first + groups.channels < C_ ? first + groups.channels : C_;
          plan.each_block(first, last, [&](int64_t, int64_t offset, Span span, int64_t c, int64_t channels) {
            direction_.measure_rows(offset, span, c, channels, all.data() + c);
          });
          for (int64_t c = first; c < last; ++c) direction_.complete(c, all[static_cast<size_t>(c)]);
          finish(first, last);
          direction_.write_rows(first * S_, {N_, S_, C_ * S_}, last - first, coefficients.from(first));
        });
      }
      measure_rows(all.data());
    }
    finish(0, C_);
    // Last task first: the end of the tensor is what the statistics left in cache.
    const StreamPlan plan(N_, C_, S_);
    parallel_for(parallel_, plan.tasks, [&](int64_t task) {
      plan.each(plan.tasks - 1 - task, [&](int64_t offset, int64_t length, int64_t c, int64_t channels) {
        direction_.write_rows(offset, {1, length, length}, channels, coefficients.from(c));
      });
    });
  }

  void measure_rows(Statistic* all) const {
    const RowPlan plan(N_, C_, S_);
    std::vector<Statistic> blocks(static_cast<size_t>(plan.blocks * C_));
    parallel_for(parallel_, plan.tasks(), [&](int64_t task) {
      plan.each_block_of_task(task, [&](int64_t b, int64_t offset, Span span, int64_t c, int64_t count) {
        direction_.measure_rows(offset, span, c, count, blocks.data() + b * C_ + c);
      });
    });
    for (int64_t b = 0; b < plan.blocks; ++b) direction_.add(all, blocks.data() + b * C_, C_);
    for (int64_t c = 0; c < C_; ++c) direction_.complete(c, all[c]);
  }

  void run_columns() {
    const ColumnPlan plan = column_plan();
    CoefficientPlanes coefficients = planes(plan.cols);
    std::vector<Statistic> all(static_cast<size_t>(C_));
    const auto finish = [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        coefficients.set(plan, c, direction_.finish(c, all[static_cast<size_t>(c)]));
      }
    };
    const auto merge_and_finish = [&](ColumnParts& parts, int64_t b, int64_t first, int64_t last) {
      merge_columns(parts, b, first, last, all.data() + first);
      finish(first, last);
    };
    if (!direction_.measures()) {
      finish(0, C_);
      return write_columns(plan, coefficients);
    }
    const int64_t bytes = Direction::kTensors * direction_.loops.element_size;
    const int64_t slab = plan.slab_channels(bytes, parallel_.width(), caches());
    if (slab == 0) {
      ColumnParts parts = measure_columns(plan);
      parts.bands.each_piece(parallel_, elements_,
                             [&](int64_t b, int64_t first, int64_t last) { merge_and_finish(parts, b, first, last); });
      return write_columns(plan, coefficients);
    }
    direction_.prepare(plan);
    ColumnParts parts(plan, slab);
    const Bands& bands = parts.bands;
    parallel_for(parallel_, bands.count, [&](int64_t b) {
      for (int64_t k = 0; k < plan.all_chunks(); ++k) measure_chunk(parts, k, b);
      merge_and_finish(parts, b, bands.first(b), bands.last(b));
      plan.each_slab_span(bands.column(b), bands.columns(b), [&](int64_t offset, Span span) {
        direction_.write_columns(offset, span, coefficients.from(bands.column(b)));
      });
    });
  }

  void measure_chunk(ColumnParts& parts, int64_t k, int64_t b) const {
    const Bands& bands = parts.bands;
    Span span;
    const int64_t offset = bands.plan.chunk(k, bands.column(b), bands.columns(b), &span);
    direction_.measure_columns(offset, span, bands.column(b), parts.first(k, b), parts.second(k, b));
  }

  ColumnParts measure_columns(const ColumnPlan& plan) {
    direction_.prepare(plan);
    ColumnParts parts(plan, plan.band_channels(kMostColumns));
    const int64_t count = parts.bands.count;
    parallel_for(parallel_, plan.all_chunks() * count,
                 [&](int64_t task) { measure_chunk(parts, task / count, task % count); });
    return parts;
  }

  // The statistics of channels [first, last) of band b (of all in a folded matrix) out of its chunks.
  void merge_columns(ColumnParts& parts, int64_t b, int64_t first, int64_t last, Statistic* channels) const {
    const ColumnPlan& plan = parts.bands.plan;
    const int64_t start = (first - parts.bands.first(b)) * plan.inner, count = last - first;
    for (int64_t k = 1; k < plan.chunks; ++k) {
      direction_.add_chunk(parts.first(0, b) + start, parts.second(0, b) + start, k * plan.chunk_rows,
                           parts.first(k, b) + start, parts.second(k, b) + start, plan.rows_of(k),
                           plan.columns_of(count));
    }
    if (plan.chunks > 0) merge_channels(parts, 0, b, start, plan.rows, plan.fold, count, channels);
    if (plan.rest_rows > 0) merge_channels(parts, plan.chunks, b, 0, plan.rest_rows, 1, count, channels);
    for (int64_t c = 0; c < count; ++c) direction_.complete(first + c, channels[c]);
  }

  // Merges the columns of each channel, `fold` times `inner` of them, of which each has `rows` values.
  void merge_channels(ColumnParts& parts, int64_t k, int64_t b, int64_t start, int64_t rows, int64_t fold,
                      int64_t count, Statistic* channels) const {
    const int64_t inner = parts.bands.plan.inner;
    for (int64_t f = 0; f < fold; ++f, start += count * inner) {
      direction_.add_columns(channels, parts.first(k, b) + start, parts.second(k, b) + start, rows, count, inner);
    }
  }

  void write_columns(const ColumnPlan& plan, const CoefficientPlanes& coefficients) const {
    const Bands bands(plan, plan.band_channels(kWideBand));
    const int64_t tasks = plan.tasks() * bands.count;
    parallel_for(parallel_, tasks, [&](int64_t task) {
      // Last task first, as for rows.
      const int64_t i = (tasks - 1 - task) / bands.count, b = (tasks - 1 - task) % bands.count;
      plan.each_span(i, bands.column(b), bands.columns(b), [&](int64_t offset, Span span) {
        direction_.write_columns(offset, span, coefficients.from(bands.column(b)));
      });
    });
  }

  Direction direction_;
  Parallel& parallel_;
  const int64_t N_, C_, S_, elements_;
};

}  // namespace bnexport::cpu
