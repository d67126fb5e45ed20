// Backward: A = sum dy and B = sum dy * x_hat, then dx = scale * ((dy - offset) - (x - mean) * slope) + rest.
//
// The same two ways as forward.cpp: by groups of channels, or all sums first.
#include <vector>

#include "bands.h"
#include "kernels.h"
#include "plan.h"
#include "table.h"

namespace bnexport::cpu {

namespace {

using Bytes = unsigned char;

void add(GradientSums& to, const GradientSums& from) {
  to.dy += from.dy;
  to.dy_x_hat += from.dy_x_hat;
}

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
    std::vector<GradientSums> channels(static_cast<size_t>(params_.C));
    if (elements_ == 0) return channels;
    if (columns_) {
      const ColumnPlan plan = column_plan();
      ColumnParts parts = column_sums(plan);
      parts.bands.each_piece(parallel_, elements_, [&](int64_t b, int64_t first, int64_t last) {
        add_columns(parts, b, first, last, channels.data());
      });
    } else {
      row_sums(channels.data());
    }
    return channels;
  }

  void run() {
    if (params_.training) share_ = group_share(params_);
    if (elements_ == 0) {
      for (int64_t c = 0; c < params_.C; ++c) finish(c, given(c));
    } else if (columns_) {
      run_columns();
    } else {
      run_rows();
    }
  }

 private:
  const void* dy(int64_t offset) const { return static_cast<const Bytes*>(params_.dy) + offset * loops_.element_size; }
  const void* x(int64_t offset) const { return static_cast<const Bytes*>(params_.x) + offset * loops_.element_size; }
  void* dx(int64_t offset) const { return static_cast<Bytes*>(params_.dx) + offset * loops_.element_size; }

  bool needs_sums() const {
    return (params_.training && params_.dx != nullptr) || params_.dweight != nullptr || params_.dbias != nullptr;
  }
  // This process's sums where other processes' are there, too.
  GradientSums given(int64_t c) const {
    if (params_.group_size == 1) return {};
    return {params_.local_moments[1 + c], params_.local_moments[1 + params_.C + c]};
  }

  BackwardCoefficients finish(int64_t c, const GradientSums& local) const {
    return finish_backward(params_, c, local, share_);
  }

  // dx of what stands in rows or columns from `offset` on. With fixed statistics dx = scale * dy, and x is not
  // read: an infinite x must not make dx NaN.
  CoefficientPlanes planes(int64_t columns) const { return {params_.dtype, params_.training ? 5 : 3, columns}; }
  static ForwardCoefficients fixed(const BackwardCoefficients& k) { return {0, k.scale, 0}; }
  void set(CoefficientPlanes& planes, int64_t c, const BackwardCoefficients& k) const {
    if (params_.training) {
      planes.set(c, k);
    } else {
      planes.set(c, fixed(k));
    }
  }
  void set(CoefficientPlanes& planes, const ColumnPlan& plan, int64_t c, const BackwardCoefficients& k) const {
    if (params_.training) {
      planes.set(plan, c, k);
    } else {
      planes.set(plan, c, fixed(k));
    }
  }
  void write_rows(int64_t offset, Span span, int64_t channels, const Planes& k) const {
    if (params_.training) {
      loops_.gradient(dy(offset), x(offset), dx(offset), span, channels, k, stream_);
    } else {
      loops_.normalise(dy(offset), dx(offset), span, channels, k, stream_);
    }
  }
  void write_columns(int64_t offset, Span span, const Planes& k) const {
    if (params_.training) {
      loops_.column_gradient(dy(offset), x(offset), dx(offset), span, k, stream_);
    } else {
      loops_.column_normalise(dy(offset), dx(offset), span, k, stream_);
    }
  }

  void run_rows() const {
    CoefficientPlanes coefficients = planes(params_.C);
    std::vector<GradientSums> all(static_cast<size_t>(params_.C));
    if (params_.group_size > 1) {
      for (int64_t c = 0; c < params_.C; ++c) all[static_cast<size_t>(c)] = given(c);
    } else if (needs_sums()) {
      const RowPlan plan(params_.N, params_.C, params_.S);
      const GroupPlan groups(plan, loops_.element_size, 2, parallel_.width(), caches());
      if (groups.channels > 0) return by_groups(plan, groups, all.data(), coefficients);
      row_sums(all.data());
    }
    for (int64_t c = 0; c < params_.C; ++c) set(coefficients, c, finish(c, all[static_cast<size_t>(c)]));
    if (params_.dx == nullptr) return;
    // Last task first: the end of the tensor is what the statistics left in cache.
    const StreamPlan plan(params_.N, params_.C, params_.S);
    parallel_for(parallel_, plan.tasks, [&](int64_t task) {
      plan.each(plan.tasks - 1 - task, [&](int64_t offset, int64_t length, int64_t c, int64_t channels) {
        write_rows(offset, {1, length, length}, channels, coefficients.from(c));
      });
    });
  }

  void by_groups(const RowPlan& plan, const GroupPlan& groups, GradientSums* all,
                 CoefficientPlanes& coefficients) const {
    parallel_for(parallel_, groups.groups, [&](int64_t group) {
      const int64_t first = group * groups.channels;
      const int64_t last = first + groups.channels < plan.C ? first + groups.channels : plan.C;
      plan.each_block(first, last, [&](int64_t, int64_t offset, Span span, int64_t c, int64_t channels) {
        loops_.gradient_sums(dy(offset), x(offset), span, channels, params_.saved_mean + c, all + c);
      });
      for (int64_t c = first; c < last; ++c) {
        all[c].dy_x_hat *= params_.saved_invstd[c];
        set(coefficients, c, finish(c, all[c]));
      }
      if (params_.dx == nullptr) return;
      write_rows(first * plan.S, {plan.N, plan.S, plan.C * plan.S}, last - first, coefficients.from(first));
    });
  }

  void row_sums(GradientSums* channels) const {
    const RowPlan plan(params_.N, params_.C, params_.S);
    std::vector<GradientSums> blocks(static_cast<size_t>(plan.blocks * plan.C));
    parallel_for(parallel_, plan.tasks(), [&](int64_t task) {
      plan.each_block_of_task(task, [&](int64_t b, int64_t offset, Span span, int64_t c, int64_t count) {
        loops_.gradient_sums(dy(offset), x(offset), span, count, params_.saved_mean + c,
                             blocks.data() + b * plan.C + c);
      });
    });
    for (int64_t b = 0; b < plan.blocks; ++b) {
      for (int64_t c = 0; c < plan.C; ++c) add(channels[c], blocks[static_cast<size_t>(b * plan.C + c)]);
    }
    for (int64_t c = 0; c < plan.C; ++c) channels[c].dy_x_hat *= params_.saved_invstd[c];
  }

  ColumnPlan column_plan() const {
    return {params_.N, params_.C, params_.S, params_.layout == BNEXPORT_NSC, loops_.element_size};
  }

  void run_columns() const {
    const ColumnPlan plan = column_plan();
    CoefficientPlanes coefficients = planes(plan.cols);
    if (params_.group_size > 1 || !needs_sums()) {
      for (int64_t c = 0; c < params_.C; ++c) set(coefficients, plan, c, finish(c, given(c)));
      return gradient_columns(plan, coefficients);
    }
    std::vector<GradientSums> all(static_cast<size_t>(params_.C));
    const auto finish_channels = [&](ColumnParts& parts, int64_t b, int64_t first, int64_t last) {
      add_columns(parts, b, first, last, all.data());
      for (int64_t c = first; c < last; ++c) set(coefficients, plan, c, finish(c, all[static_cast<size_t>(c)]));
    };
    const int64_t slab = plan.slab_channels(2 * loops_.element_size, parallel_.width(), caches());
    if (slab == 0) {
      ColumnParts parts = column_sums(plan);
      parts.bands.each_piece(parallel_, elements_,
                             [&](int64_t b, int64_t first, int64_t last) { finish_channels(parts, b, first, last); });
      return gradient_columns(plan, coefficients);
    }
    const std::vector<double> means = column_means(plan);
    ColumnParts parts(plan, slab);
    const Bands& bands = parts.bands;
    parallel_for(parallel_, bands.count, [&](int64_t b) {
      for (int64_t k = 0; k < plan.all_chunks(); ++k) column_sums(parts, means, k, b);
      finish_channels(parts, b, bands.first(b), bands.last(b));
      if (params_.dx == nullptr) return;
      plan.each_slab_span(bands.column(b), bands.columns(b), [&](int64_t offset, Span span) {
        write_columns(offset, span, coefficients.from(bands.column(b)));
      });
    });
  }

  // The means of columns, where they are not those of the channels.
  std::vector<double> column_means(const ColumnPlan& plan) const {
    std::vector<double> means(static_cast<size_t>(plan.fold * plan.inner == 1 ? 0 : plan.cols));
    for (size_t j = 0; j < means.size();) {
      const double mean = params_.saved_mean[static_cast<int64_t>(j) / plan.inner % plan.C];
      for (int64_t s = 0; s < plan.inner; ++s) means[j++] = mean;
    }
    return means;
  }

  void column_sums(ColumnParts& parts, const std::vector<double>& means, int64_t k, int64_t b) const {
    const Bands& bands = parts.bands;
    Span span;
    const int64_t offset = bands.plan.chunk(k, bands.column(b), bands.columns(b), &span);
    const double* mean = (means.empty() ? params_.saved_mean : means.data()) + bands.column(b);
    loops_.column_gradient_sums(dy(offset), x(offset), span, mean, parts.first(k, b), parts.second(k, b));
  }

  ColumnParts column_sums(const ColumnPlan& plan) const {
    const std::vector<double> means = column_means(plan);
    ColumnParts parts(plan, plan.band_channels(kMostColumns));
    const int64_t count = parts.bands.count;
    parallel_for(parallel_, plan.all_chunks() * count,
                 [&](int64_t task) { column_sums(parts, means, task / count, task % count); });
    return parts;
  }

  // The sums of channels [first, last) of band b (of all in a folded matrix) out of its chunks.
  void add_columns(ColumnParts& parts, int64_t b, int64_t first, int64_t last, GradientSums* all) const {
    const ColumnPlan& plan = parts.bands.plan;
    const int64_t start = (first - parts.bands.first(b)) * plan.inner, columns = plan.columns_of(last - first);
    double *dy_sums = parts.first(0, b) + start, *products = parts.second(0, b) + start;
    for (int64_t k = 1; k < plan.chunks; ++k) {
      const double *more_dy = parts.first(k, b) + start, *more_products = parts.second(k, b) + start;
      for (int64_t j = 0; j < columns; ++j) dy_sums[j] += more_dy[j];
      for (int64_t j = 0; j < columns; ++j) products[j] += more_products[j];
    }
    const auto add_chunk = [&](const double* sums, const double* product_sums, int64_t fold) {
      for (int64_t f = 0; f < fold; ++f) {
        for (int64_t c = first; c < last; ++c) {
          for (int64_t s = 0; s < plan.inner; ++s) add(all[c], {*sums++, *product_sums++});
        }
      }
    };
    if (plan.chunks > 0) add_chunk(dy_sums, products, plan.fold);
    if (plan.rest_rows > 0) add_chunk(parts.first(plan.chunks, b), parts.second(plan.chunks, b), 1);
    for (int64_t c = first; c < last; ++c) all[c].dy_x_hat *= params_.saved_invstd[c];
  }

  void gradient_columns(const ColumnPlan& plan, const CoefficientPlanes& coefficients) const {
    if (params_.dx == nullptr) return;
    const Bands bands(plan, plan.band_channels(kWideBand));
    const int64_t tasks = plan.tasks() * bands.count;
    parallel_for(parallel_, tasks, [&](int64_t task) {
      // Last task first, as for rows.
      const int64_t i = (tasks - 1 - task) / bands.count, b = (tasks - 1 - task) % bands.count;
      plan.each_span(i, bands.column(b), bands.columns(b), [&](int64_t offset, Span span) {
        write_columns(offset, span, coefficients.from(bands.column(b)));
      });
    });
  }

  const bnexport_backward& params_;
  const Table& loops_;
  Parallel& parallel_;
  const int64_t elements_;
  const bool columns_, stream_;
  GroupShare share_;
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
