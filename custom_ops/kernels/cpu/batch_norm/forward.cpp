// Forward: statistics of the batch, then y = (x - mean) * scale + bias.
#include "passes.h"

namespace bnexport::cpu {

namespace {

struct Forward {
  using Statistic = Moments;
  using Coefficients = ForwardCoefficients;
  static constexpr int64_t kTensors = 1;

  const bnexport_forward& params;
  const Table& loops;
  bool stream;

  explicit Forward(const bnexport_forward& params)
      : params(params),
        loops(table(params.dtype)),
        stream(!caches().hold(2 * params.N * params.C * params.S * loops.element_size)) {}

  const void* x(int64_t offset) const { return static_cast<const char*>(params.x) + offset * loops.element_size; }
  void* y(int64_t offset) const { return static_cast<char*>(params.y) + offset * loops.element_size; }

  bool measures() const { return params.training != 0 && params.group_size == 1; }
  void prepare(const ColumnPlan&) {}
  void measure_rows(int64_t offset, Span span, int64_t, int64_t channels, Moments* all) const {
    loops.moments(x(offset), span, channels, all);
  }
  void measure_columns(int64_t offset, Span span, int64_t, double* mean, double* m2) const {
    loops.column_moments(x(offset), span, mean, m2);
  }
  void add(Moments* all, const Moments* part, int64_t count) const { loops.merge(all, part, count); }
  void add_chunk(double* mean, double* m2, int64_t before, const double* part_mean, const double* part_m2, int64_t rows,
                 int64_t columns) const {
    loops.merge_columns(mean, m2, static_cast<double>(before), part_mean, part_m2, static_cast<double>(rows), columns);
  }
  void add_columns(Moments* all, const double* mean, const double* m2, int64_t rows, int64_t count,
                   int64_t inner) const {
    constexpr int64_t kTogether = 64;
    for (int64_t c = 0; c < count; c += kTogether) {
      Moments some[kTogether];
      const int64_t together = count - c < kTogether ? count - c : kTogether;
      for (int64_t s = 0; s < inner; ++s) {
        for (int64_t i = 0; i < together; ++i) {
          some[i] = {static_cast<double>(rows), mean[(c + i) * inner + s], m2[(c + i) * inner + s]};
        }
        add(all + c, some, together);
      }
    }
  }
  static void complete(int64_t, const Moments&) {}

  ForwardCoefficients finish(int64_t c, const Moments& own) const {
    if (!params.training) return finish_inference(params, c);
    if (params.group_size > 1) return finish_training(params, c, gathered_statistics(params, c));
    return finish_training(params, c, local_statistics(own));
  }
  void write_rows(int64_t offset, Span span, int64_t channels, const Planes& k) const {
    loops.normalise(x(offset), y(offset), span, channels, k, stream);
  }
  void write_columns(int64_t offset, Span span, const Planes& k) const {
    loops.column_normalise(x(offset), y(offset), span, k, stream);
  }
};

}  // namespace

void forward_row(const bnexport_forward& params, Parallel& parallel, double* row) {
  const std::vector<Moments> moments = Passes(Forward(params), parallel).statistics();
  row[0] = row_weight(params.stats_mode, params.N, params.S);
  for (int64_t c = 0; c < params.C; ++c) {
    row[1 + c] = moments[static_cast<size_t>(c)].mean;
    row[1 + params.C + c] = row_spread(params.stats_mode, moments[static_cast<size_t>(c)]);
  }
}

void forward(const bnexport_forward& params, Parallel& parallel) { Passes(Forward(params), parallel).run(); }

}  // namespace bnexport::cpu
