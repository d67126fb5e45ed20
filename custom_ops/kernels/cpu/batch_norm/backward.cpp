// Backward: A = sum dy and B = sum dy * x_hat, then dx = scale * ((dy - offset) - (x - mean) * slope) + rest.
#include "passes.h"

namespace bnexport::cpu {

namespace {

struct Backward {
  using Statistic = GradientSums;
  using Coefficients = BackwardCoefficients;
  static constexpr int64_t kTensors = 2;

  const bnexport_backward& params;
  const Table& loops;
  bool stream;
  GroupShare share{};
  std::vector<double> means{};  // of columns, where they are not those of the channels

  explicit Backward(const bnexport_backward& params)
      : params(params),
        loops(table(params.dtype)),
        stream(!caches().hold(3 * params.N * params.C * params.S * loops.element_size)) {}

  const void* dy(int64_t offset) const { return static_cast<const char*>(params.dy) + offset * loops.element_size; }
  const void* x(int64_t offset) const { return static_cast<const char*>(params.x) + offset * loops.element_size; }
  void* dx(int64_t offset) const { return static_cast<char*>(params.dx) + offset * loops.element_size; }

  bool measures() const {
    const bool needed =
        (params.training && params.dx != nullptr) || params.dweight != nullptr || params.dbias != nullptr;
    return needed && params.group_size == 1;
  }
  void prepare(const ColumnPlan& plan) {
    means.resize(static_cast<size_t>(plan.fold * plan.inner == 1 ? 0 : plan.cols));
    for (size_t j = 0; j < means.size();) {
      const double mean = params.saved_mean[static_cast<int64_t>(j) / plan.inner % plan.C];
      for (int64_t s = 0; s < plan.inner; ++s) means[j++] = mean;
    }
  }
  void measure_rows(int64_t offset, Span span, int64_t c, int64_t channels, GradientSums* all) const {
    loops.gradient_sums(dy(offset), x(offset), span, channels, params.saved_mean + c, all);
  }
  void measure_columns(int64_t offset, Span span, int64_t column, double* dy_sums, double* products) const {
    const double* mean = (means.empty() ? params.saved_mean : means.data()) + column;
    loops.column_gradient_sums(dy(offset), x(offset), span, mean, dy_sums, products);
  }
  static void add(GradientSums* all, const GradientSums* part, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      all[i].dy += part[i].dy;
      all[i].dy_x_hat += part[i].dy_x_hat;
    }
  }
  static void add_chunk(double* dy_sums, double* products, int64_t, const double* more_dy, const double* more_products,
                        int64_t, int64_t columns) {
    for (int64_t j = 0; j < columns; ++j) dy_sums[j] += more_dy[j];
    for (int64_t j = 0; j < columns; ++j) products[j] += more_products[j];
  }
  static void add_columns(GradientSums* all, const double* dy_sums, const double* products, int64_t, int64_t count,
                          int64_t inner) {
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t s = 0; s < inner; ++s) {
        all[c].dy += *dy_sums++;
        all[c].dy_x_hat += *products++;
      }
    }
  }
  void complete(int64_t c, GradientSums& sums) const { sums.dy_x_hat *= params.saved_invstd[c]; }

  BackwardCoefficients finish(int64_t c, const GradientSums& own) const {
    if (params.group_size == 1) return finish_backward(params, c, own, share);
    return finish_backward(params, c, {params.local_moments[1 + c], params.local_moments[1 + params.C + c]}, share);
  }
  // With fixed statistics dx = scale * dy, the other coefficients are 0, and x is not read: an infinite x must not make
  // dx NaN.
  void write_rows(int64_t offset, Span span, int64_t channels, const Planes& k) const {
    if (params.dx == nullptr) return;
    if (params.training) {
      loops.gradient(dy(offset), x(offset), dx(offset), span, channels, k, stream);
    } else {
      loops.normalise(dy(offset), dx(offset), span, channels, k, stream);
    }
  }
  void write_columns(int64_t offset, Span span, const Planes& k) const {
    if (params.dx == nullptr) return;
    if (params.training) {
      loops.column_gradient(dy(offset), x(offset), dx(offset), span, k, stream);
    } else {
      loops.column_normalise(dy(offset), dx(offset), span, k, stream);
    }
  }
};

}  // namespace

void backward_row(const bnexport_backward& params, Parallel& parallel, double* row) {
  const std::vector<GradientSums> sums = Passes(Backward(params), parallel).statistics();
  row[0] = row_weight(params.stats_mode, params.N, params.S);
  for (int64_t c = 0; c < params.C; ++c) {
    row[1 + c] = sums[static_cast<size_t>(c)].dy;
    row[1 + params.C + c] = sums[static_cast<size_t>(c)].dy_x_hat;
  }
}

void backward(const bnexport_backward& params, Parallel& parallel) {
  Backward direction(params);
  if (params.training) direction.share = group_share(params);
  Passes(std::move(direction), parallel).run();
}

}  // namespace bnexport::cpu
