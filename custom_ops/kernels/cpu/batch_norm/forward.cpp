// Forward: statistics of the batch, then y = (x - mean) * scale + bias.
//
// plan.h says how the tensor is cut: groups of channels whose second read comes from cache, or all
// statistics first and then the output. Both give the same bits.
#include <vector>

#include "bands.h"
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
    std::vector<Moments> channels(static_cast<size_t>(params_.C));
    if (elements_ == 0) return channels;
    if (!columns_) {
      row_moments(channels.data());
      return channels;
    }
    const ColumnPlan plan = column_plan();
    ColumnParts parts = column_moments(plan);
    parts.bands.each_piece(parallel_, elements_, [&](int64_t b, int64_t first, int64_t last) {
      merge_columns(parts, b, first, last, channels.data() + first);
    });
    return channels;
  }

  void run() const {
    if (elements_ == 0) {
      for (int64_t c = 0; c < params_.C; ++c) finish(c, nullptr);
    } else if (columns_) {
      run_columns();
    } else {
      run_rows();
    }
  }

 private:
  const void* x(int64_t offset) const { return static_cast<const Bytes*>(params_.x) + offset * loops_.element_size; }
  void* y(int64_t offset) const { return static_cast<Bytes*>(params_.y) + offset * loops_.element_size; }
  bool own_statistics() const { return params_.training && params_.group_size == 1; }

  // `own`: this process's moments of the channel, where they are what counts.
  ForwardCoefficients finish(int64_t c, const Moments* own) const {
    if (!params_.training) return finish_inference(params_, c);
    if (params_.group_size > 1) return finish_training(params_, c, gathered_statistics(params_, c));
    return finish_training(params_, c, local_statistics(own == nullptr ? Moments{} : *own));
  }

  void run_rows() const {
    CoefficientPlanes coefficients(params_.dtype, 3, params_.C);
    std::vector<Moments> all;
    if (own_statistics()) {
      all.resize(static_cast<size_t>(params_.C));
      const RowPlan plan(params_.N, params_.C, params_.S);
      const GroupPlan groups(plan, loops_.element_size, 1, parallel_.width(), caches());
      if (groups.channels > 0) return train_by_groups(plan, groups, all.data(), coefficients);
      row_moments(all.data());
    }
    for (int64_t c = 0; c < params_.C; ++c) {
      coefficients.set(c, finish(c, all.empty() ? nullptr : &all[static_cast<size_t>(c)]));
    }
    // Last task first: the end of the tensor is what the statistics left in cache.
    const StreamPlan plan(params_.N, params_.C, params_.S);
    parallel_for(parallel_, plan.tasks, [&](int64_t task) {
      plan.each(plan.tasks - 1 - task, [&](int64_t offset, int64_t length, int64_t c, int64_t channels) {
        loops_.normalise(x(offset), y(offset), {1, length, length}, channels, coefficients.from(c), stream_);
      });
    });
  }

  void train_by_groups(const RowPlan& plan, const GroupPlan& groups, Moments* all,
                       CoefficientPlanes& coefficients) const {
    parallel_for(parallel_, groups.groups, [&](int64_t group) {
      const int64_t first = group * groups.channels;
      const int64_t last = first + groups.channels < plan.C ? first + groups.channels : plan.C;
      plan.each_block(first, last, [&](int64_t, int64_t offset, Span span, int64_t c, int64_t channels) {
        loops_.moments(x(offset), span, channels, all + c);
      });
      for (int64_t c = first; c < last; ++c) coefficients.set(c, finish(c, all + c));
      loops_.normalise(x(first * plan.S), y(first * plan.S), {plan.N, plan.S, plan.C * plan.S}, last - first,
                       coefficients.from(first), stream_);
    });
  }

  void row_moments(Moments* channels) const {
    const RowPlan plan(params_.N, params_.C, params_.S);
    std::vector<Moments> blocks(static_cast<size_t>(plan.blocks * plan.C));
    parallel_for(parallel_, plan.tasks(), [&](int64_t task) {
      plan.each_block_of_task(task, [&](int64_t b, int64_t offset, Span span, int64_t c, int64_t count) {
        loops_.moments(x(offset), span, count, blocks.data() + b * plan.C + c);
      });
    });
    for (int64_t b = 0; b < plan.blocks; ++b) loops_.merge(channels, blocks.data() + b * plan.C, plan.C);
  }

  ColumnPlan column_plan() const {
    return {params_.N, params_.C, params_.S, params_.layout == BNEXPORT_NSC, loops_.element_size};
  }

  void run_columns() const {
    const ColumnPlan plan = column_plan();
    CoefficientPlanes coefficients(params_.dtype, 3, plan.cols);
    if (!own_statistics()) {
      for (int64_t c = 0; c < params_.C; ++c) coefficients.set(plan, c, finish(c, nullptr));
      return normalise_columns(plan, coefficients);
    }
    std::vector<Moments> all(static_cast<size_t>(params_.C));
    const auto finish_channels = [&](ColumnParts& parts, int64_t b, int64_t first, int64_t last) {
      merge_columns(parts, b, first, last, all.data() + first);
      for (int64_t c = first; c < last; ++c) coefficients.set(plan, c, finish(c, &all[static_cast<size_t>(c)]));
    };
    const int64_t slab = plan.slab_channels(loops_.element_size, parallel_.width(), caches());
    if (slab == 0) {
      ColumnParts parts = column_moments(plan);
      parts.bands.each_piece(parallel_, elements_,
                             [&](int64_t b, int64_t first, int64_t last) { finish_channels(parts, b, first, last); });
      return normalise_columns(plan, coefficients);
    }
    ColumnParts parts(plan, slab);
    const Bands& bands = parts.bands;
    parallel_for(parallel_, bands.count, [&](int64_t b) {
      for (int64_t k = 0; k < plan.all_chunks(); ++k) column_moments(parts, k, b);
      finish_channels(parts, b, bands.first(b), bands.last(b));
      plan.each_slab_span(bands.column(b), bands.columns(b), [&](int64_t offset, Span span) {
        loops_.column_normalise(x(offset), y(offset), span, coefficients.from(bands.column(b)), stream_);
      });
    });
  }

  void column_moments(ColumnParts& parts, int64_t k, int64_t b) const {
    const Bands& bands = parts.bands;
    Span span;
    const int64_t offset = bands.plan.chunk(k, bands.column(b), bands.columns(b), &span);
    loops_.column_moments(x(offset), span, parts.first(k, b), parts.second(k, b));
  }

  ColumnParts column_moments(const ColumnPlan& plan) const {
    ColumnParts parts(plan, plan.band_channels(kMostColumns));
    const int64_t count = parts.bands.count;
    parallel_for(parallel_, plan.all_chunks() * count,
                 [&](int64_t task) { column_moments(parts, task / count, task % count); });
    return parts;
  }

  // The moments of channels [first, last) of band b (of all in a folded matrix) out of its chunks.
  void merge_columns(ColumnParts& parts, int64_t b, int64_t first, int64_t last, Moments* channels) const {
    const ColumnPlan& plan = parts.bands.plan;
    const int64_t start = (first - parts.bands.first(b)) * plan.inner, columns = plan.columns_of(last - first);
    for (int64_t k = 1; k < plan.chunks; ++k) {
      loops_.merge_columns(parts.first(0, b) + start, parts.second(0, b) + start,
                           static_cast<double>(k * plan.chunk_rows), parts.first(k, b) + start,
                           parts.second(k, b) + start, static_cast<double>(plan.rows_of(k)), columns);
    }
    if (plan.chunks > 0) merge_channels(parts, 0, b, start, plan.rows, plan.fold, last - first, channels);
    if (plan.rest_rows > 0) merge_channels(parts, plan.chunks, b, 0, plan.rest_rows, 1, last - first, channels);
  }

  // Merges the columns of each channel, `fold` times `inner` of them, of which each has `rows` values.
  void merge_channels(ColumnParts& parts, int64_t k, int64_t b, int64_t start, int64_t rows, int64_t fold,
                      int64_t count, Moments* channels) const {
    constexpr int64_t kTogether = 64;
    const int64_t inner = parts.bands.plan.inner;
    const double *mean = parts.first(k, b) + start, *m2 = parts.second(k, b) + start;
    for (int64_t c = 0; c < count; c += kTogether) {
      Moments some[kTogether];
      const int64_t together = count - c < kTogether ? count - c : kTogether;
      for (int64_t f = 0; f < fold; ++f) {
        for (int64_t s = 0; s < inner; ++s) {
          for (int64_t i = 0; i < together; ++i) {
            const int64_t column = (f * count + c + i) * inner + s;
            some[i] = {static_cast<double>(rows), mean[column], m2[column]};
          }
          loops_.merge(channels + c, some, together);
        }
      }
    }
  }

  void normalise_columns(const ColumnPlan& plan, const CoefficientPlanes& coefficients) const {
    const Bands bands(plan, plan.band_channels(kWideBand));
    const int64_t tasks = plan.tasks() * bands.count;
    parallel_for(parallel_, tasks, [&](int64_t task) {
      // Last task first, as for rows.
      const int64_t i = (tasks - 1 - task) / bands.count, b = (tasks - 1 - task) % bands.count;
      plan.each_span(i, bands.column(b), bands.columns(b), [&](int64_t offset, Span span) {
        loops_.column_normalise(x(offset), y(offset), span, coefficients.from(bands.column(b)), stream_);
      });
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
